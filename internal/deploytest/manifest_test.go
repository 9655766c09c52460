package deploytest

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"sigs.k8s.io/yaml"
)

const root = "../.."

// manifest is one file of configs/k8s: a deployment and what it refers to.
type manifest struct {
	deployment *appsv1.Deployment
	configs    map[string]*corev1.ConfigMap
	accounts   map[string]*corev1.ServiceAccount
	budgets    []*policyv1.PodDisruptionBudget
}

// decode reads a file strictly: a field that the API does not have, or has twice, is an error, and so is a kind that nothing here looks at.
func decode(text string) (*manifest, error) {
	m := &manifest{configs: map[string]*corev1.ConfigMap{}, accounts: map[string]*corev1.ServiceAccount{}}
	for i, doc := range strings.Split(text, "\n---\n") {
		var head struct {
			APIVersion string `json:"apiVersion"`
			Kind       string `json:"kind"`
		}
		if err := yaml.Unmarshal([]byte(doc), &head); err != nil {
			return nil, fmt.Errorf("document %d: %w", i, err)
		}
		if err := m.add(head.APIVersion+" "+head.Kind, []byte(doc)); err != nil {
			return nil, fmt.Errorf("document %d: %w", i, err)
		}
	}
	if m.deployment == nil {
		return nil, fmt.Errorf("no deployment")
	}
	return m, nil
}

func (m *manifest) add(kind string, doc []byte) error {
	switch kind {
	case "apps/v1 Deployment":
		if m.deployment != nil {
			return fmt.Errorf("a second deployment")
		}
		m.deployment = &appsv1.Deployment{}
		return yaml.UnmarshalStrict(doc, m.deployment)
	case "v1 ConfigMap":
		c := &corev1.ConfigMap{}
		err := yaml.UnmarshalStrict(doc, c)
		m.configs[c.Name] = c
		return err
	case "v1 ServiceAccount":
		a := &corev1.ServiceAccount{}
		err := yaml.UnmarshalStrict(doc, a)
		m.accounts[a.Name] = a
		return err
	case "policy/v1 PodDisruptionBudget":
		b := &policyv1.PodDisruptionBudget{}
		err := yaml.UnmarshalStrict(doc, b)
		m.budgets = append(m.budgets, b)
		return err
	}
	return fmt.Errorf("nothing is known about %s", kind)
}

// pod gives the manifest's pod template and its only container.
func (m *manifest) pod() (*corev1.PodSpec, *corev1.Container, error) {
	spec := &m.deployment.Spec.Template.Spec
	if len(spec.Containers) != 1 || len(spec.InitContainers) != 0 {
		return nil, nil, fmt.Errorf("the pod has %d containers and %d that come before; the checks are for one", len(spec.Containers), len(spec.InitContainers))
	}
	return spec, &spec.Containers[0], nil
}

// fields are what the kubelet fills in, as it could be.
var fields = map[string]string{"status.podIP": "10.20.30.40", "metadata.name": "dynworker-7d9c", "metadata.uid": "5f7c2f9e-8b0f-4a0e-9d52-6c1f1f6b0f6e"}

// environ is the environment that the kubelet gives to a container.
func environ(c *corev1.Container) ([]string, error) {
	var out []string
	seen := map[string]bool{}
	for _, e := range c.Env {
		value := e.Value
		if e.ValueFrom != nil {
			if e.ValueFrom.FieldRef == nil {
				return nil, fmt.Errorf("variable %s comes from something that these checks do not know", e.Name)
			}
			known := false
			if value, known = fields[e.ValueFrom.FieldRef.FieldPath]; !known {
				return nil, fmt.Errorf("variable %s comes from the field %s, which these checks do not know", e.Name, e.ValueFrom.FieldRef.FieldPath)
			}
		}
		if seen[e.Name] {
			return nil, fmt.Errorf("variable %s is set twice", e.Name)
		}
		seen[e.Name] = true
		out = append(out, e.Name+"="+value)
	}
	return out, nil
}

var reference = regexp.MustCompile(`\$\(([A-Za-z_][A-Za-z0-9_]*)\)`)

// arguments are a container's arguments with references to variables replaced. The kubelet leaves one to a variable that is not set as it stands; here it is an error.
func arguments(c *corev1.Container, environ []string) ([]string, error) {
	var missing error
	out := make([]string, len(c.Args))
	for i, a := range c.Args {
		out[i] = reference.ReplaceAllStringFunc(a, func(ref string) string {
			name := reference.FindStringSubmatch(ref)[1]
			for _, kv := range environ {
				if value, ok := strings.CutPrefix(kv, name+"="); ok {
					return value
				}
			}
			missing = fmt.Errorf("argument %q refers to a variable that is not set", a)
			return ref
		})
	}
	return out, missing
}

// readFile reads what a container would find in its mounted config maps.
func (m *manifest) readFile(spec *corev1.PodSpec, c *corev1.Container) func(string) ([]byte, error) {
	return func(name string) ([]byte, error) {
		for _, mount := range c.VolumeMounts {
			if path.Dir(name) != mount.MountPath {
				continue
			}
			v := volume(spec, mount.Name)
			if v == nil || v.ConfigMap == nil || m.configs[v.ConfigMap.Name] == nil {
				continue
			}
			if text, ok := m.configs[v.ConfigMap.Name].Data[path.Base(name)]; ok {
				return []byte(text), nil
			}
		}
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
}

func volume(spec *corev1.PodSpec, name string) *corev1.Volume {
	i := slices.IndexFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	if i < 0 {
		return nil
	}
	return &spec.Volumes[i]
}

// manifests are the texts of configs/k8s by file name.
func manifests(t *testing.T) map[string]string {
	files, err := filepath.Glob(filepath.Join(root, "configs/k8s/*"))
	require.NoError(t, err)
	out := map[string]string{}
	for _, f := range files {
		text, err := os.ReadFile(f)
		require.NoError(t, err)
		out[filepath.Base(f)] = string(text)
	}
	require.Contains(t, out, "trtllm.yaml")
	require.Contains(t, out, "sim.yaml")
	return out
}
