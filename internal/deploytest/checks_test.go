package deploytest

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"dynworker/internal/app"
	"dynworker/internal/cli"
	"dynworker/pkg/config"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
)

// engineVariables are those in manifests that the worker has no part in: it hands them to the engine, or the manifest's own arguments refer to them.
var engineVariables = []string{"HF_HUB_OFFLINE", "POD_IP"}

const (
	gpuResource = corev1.ResourceName("nvidia.com/gpu")
	// spare is what a grace period has to leave beyond all bounds, and slack what it may have at most: a manifest that fits by far was written for another worker.
	spare = 5 * time.Second
	slack = time.Minute
)

// inspection collects what is wrong with one manifest.
type inspection struct {
	m        *manifest
	images   map[string]*image
	spec     *corev1.PodSpec
	c        *corev1.Container
	image    *image
	cfg      *config.Config
	problems []string
}

func (i *inspection) complain(format string, args ...any) {
	i.problems = append(i.problems, fmt.Sprintf(format, args...))
}

// want complains unless got is wanted.
func want[T comparable](i *inspection, what string, got, wanted T) {
	if got != wanted {
		i.complain("%s is %v, not %v", what, got, wanted)
	}
}

// inspect finds everything that is wrong with a manifest.
func inspect(text string, images map[string]*image) []string {
	m, err := decode(text)
	if err != nil {
		return []string{err.Error()}
	}
	i := &inspection{m: m, images: images}
	if i.spec, i.c, err = m.pod(); err != nil {
		return []string{err.Error()}
	}
	i.names()
	i.imageAndUser()
	i.configuration()
	if i.cfg == nil || i.image == nil {
		return i.problems
	}
	i.ports()
	i.probes()
	i.stop()
	i.resources()
	i.files()
	i.rights()
	return i.problems
}

// names checks names, and what refers to something else by its name or labels.
func (i *inspection) names() {
	d := i.m.deployment
	names := []string{d.Name, i.c.Name}
	for _, c := range i.m.configs {
		names = append(names, c.Name)
	}
	for _, v := range i.spec.Volumes {
		names = append(names, v.Name)
	}
	for _, name := range names {
		for _, problem := range validation.IsDNS1123Label(name) {
			i.complain("name %q: %s", name, problem)
		}
	}
	pod := labels.Set(d.Spec.Template.Labels)
	if s := d.Spec.Selector; s == nil || len(s.MatchLabels) == 0 || !labels.SelectorFromSet(s.MatchLabels).Matches(pod) {
		i.complain("the deployment does not select its own pods")
	}
	want(i, "number of disruption budgets", len(i.m.budgets), 1)
	for _, b := range i.m.budgets {
		if s := b.Spec.Selector; s == nil || len(s.MatchLabels) == 0 || !labels.SelectorFromSet(s.MatchLabels).Matches(pod) {
			i.complain("disruption budget %s is not for these pods", b.Name)
		}
		if m := b.Spec.MaxUnavailable; m == nil || m.IntValue() < 1 {
			i.complain("disruption budget %s would keep a node from ever being emptied", b.Name)
		}
	}
	account := i.m.accounts[i.spec.ServiceAccountName]
	if account == nil {
		i.complain("service account %q is not in the file", i.spec.ServiceAccountName)
	} else if t := account.AutomountServiceAccountToken; t == nil || *t {
		i.complain("the service account hands out its token")
	}
	if t := i.spec.AutomountServiceAccountToken; t == nil || *t {
		i.complain("the pod gets a token that the worker has no use for")
	}
	// Variables of Services are named after them, so one named dyn-system would set DYN_SYSTEM_PORT.
	if l := i.spec.EnableServiceLinks; l == nil || *l {
		i.complain("Services can set variables of the worker")
	}
	for _, v := range i.spec.Volumes {
		if v.ConfigMap != nil && i.m.configs[v.ConfigMap.Name] == nil {
			i.complain("config map %q is not in the file", v.ConfigMap.Name)
		}
	}
}

// imageAndUser checks that the container runs an image of the Dockerfile as it is meant to be run.
func (i *inspection) imageAndUser() {
	if i.image = i.images[i.c.Image]; i.image == nil {
		i.complain("image %q is not one that the Dockerfile builds", i.c.Image)
		return
	}
	if len(i.c.Command) > 0 {
		i.complain("the command replaces the image's entry point, which passes signals on")
	}
	i.user()
}

func (i *inspection) user() {
	s := i.spec.SecurityContext
	if s == nil || s.RunAsUser == nil || s.RunAsGroup == nil || s.RunAsNonRoot == nil || !*s.RunAsNonRoot {
		i.complain("the pod's user is not fixed to one that is not root")
		return
	}
	want(i, "user", fmt.Sprintf("%d:%d", *s.RunAsUser, *s.RunAsGroup), i.image.user)
}

// configuration loads the worker's configuration as the container would.
func (i *inspection) configuration() {
	environ, err := environ(i.c)
	if err != nil {
		i.complain("%v", err)
		return
	}
	i.variables()
	args, err := arguments(i.c, environ)
	if err != nil {
		i.complain("%v", err)
		return
	}
	if len(args) == 0 || args[0] != "serve" {
		i.complain("the arguments do not begin with serve")
		return
	}
	read := i.m.readFile(i.spec, i.c)
	cfg, report, err := config.Load(args[1:], environ, read)
	if err != nil {
		i.complain("configuration: %v", err)
		return
	}
	for _, w := range report.Warnings {
		i.complain("configuration: warning: %s", w)
	}
	if err := cfg.CheckServing(); err != nil {
		i.complain("configuration: %v", err)
	}
	gpus := i.c.Resources.Limits[gpuResource]
	resolved, err := cfg.Resolve(config.Surroundings{ReadFile: read, VisibleGPUs: int(gpus.Value()), Environ: environ})
	if err != nil {
		i.complain("engine arguments: %v", err)
		return
	}
	for _, w := range resolved.Warnings {
		i.complain("engine arguments: warning: %s", w)
	}
	i.cfg = cfg
	if i.image == nil {
		return
	}
	want(i, "engine", cfg.Engine.Kind, map[string]string{"worker": config.EngineTRTLLM, "sim": config.EngineSim}[i.image.target])
	// What every pod has to say for itself, and what has to be said once the default address is another machine.
	want(i, "address of the model's files", cfg.Model.FilesAddress, fields["status.podIP"])
	want(i, "routing identity", cfg.Model.StableRoutingID, fields["metadata.uid"])
	for key, used := range map[string]bool{"etcd.endpoints": true, "nats.server": cfg.RequestPlane.Kind == config.PlaneNATS, "request_plane.kind": true, "namespace": true} {
		if s, _ := report.Lookup(key); used && s.Origin.Kind != config.FromEnv {
			i.complain("%s is not set by a variable", key)
		}
	}
}

// variables checks that each variable does something.
func (i *inspection) variables() {
	known := config.Variables()
	for _, e := range i.c.Env {
		used := slices.ContainsFunc(known, func(v config.Variable) bool { return v.Name == e.Name && v.Status == config.Used })
		if !used && !slices.Contains(engineVariables, e.Name) {
			i.complain("variable %s sets nothing", e.Name)
		}
	}
}

// ports checks that every port that is named is open, and every one that is open is named.
func (i *inspection) ports() {
	open := map[string]int{"system": i.cfg.System.Port}
	if i.cfg.RequestPlane.Kind == config.PlaneTCP {
		open["requests"] = i.cfg.RequestPlane.TCP.Port
		want(i, "address of the request plane", i.cfg.RequestPlane.TCP.Host, fields["status.podIP"])
	}
	want(i, "number of ports", len(i.c.Ports), len(open))
	for _, p := range i.c.Ports {
		for _, problem := range validation.IsValidPortName(p.Name) {
			i.complain("port %q: %s", p.Name, problem)
		}
		want(i, "port "+p.Name, int(p.ContainerPort), open[p.Name])
		if !slices.Contains(i.image.exposed, strconv.Itoa(int(p.ContainerPort))) {
			i.complain("port %s is not exposed by the image", p.Name)
		}
	}
}

// probes checks that the kubelet asks what the worker answers, and has patience with it.
func (i *inspection) probes() {
	for _, p := range []struct {
		name  string
		probe *corev1.Probe
		path  string
		// least is the shortest time without an answer that may have consequences.
		least time.Duration
	}{
		{"startup probe", i.c.StartupProbe, i.cfg.System.LivePath, 30 * time.Second},
		// A busy node can delay an answer; nothing but a restart would follow.
		{"liveness probe", i.c.LivenessProbe, i.cfg.System.LivePath, 15 * time.Second},
		{"readiness probe", i.c.ReadinessProbe, i.cfg.System.HealthPath, 5 * time.Second},
	} {
		if p.probe == nil || p.probe.HTTPGet == nil {
			i.complain("no %s over HTTP", p.name)
			continue
		}
		want(i, p.name+"'s path", p.probe.HTTPGet.Path, p.path)
		want(i, p.name+"'s port", p.probe.HTTPGet.Port.String(), "system")
		want(i, p.name+"'s scheme", p.probe.HTTPGet.Scheme, "")
		want(i, p.name+"'s own grace period", p.probe.TerminationGracePeriodSeconds == nil, true)
		if patience := time.Duration(p.probe.PeriodSeconds) * time.Duration(p.probe.FailureThreshold) * time.Second; patience < p.least {
			i.complain("%s gives up after %v, less than %v", p.name, patience, p.least)
		}
	}
}

// stop checks that the kubelet waits for all that a drain can take, and that a rollout waits for a load.
func (i *inspection) stop() {
	if i.spec.TerminationGracePeriodSeconds == nil {
		i.complain("no termination grace period")
		return
	}
	grace := time.Duration(*i.spec.TerminationGracePeriodSeconds) * time.Second
	longest := app.LongestStop(i.cfg)
	if grace < longest+spare {
		i.complain("the grace period of %v is less than %v for the longest stop and %v to spare", grace, longest, spare)
	}
	if grace > longest+spare+slack {
		i.complain("the grace period of %v is far more than the longest stop, %v", grace, longest)
	}
	// The clock of the grace period starts with preStop, while the worker is still registered.
	if i.c.Lifecycle != nil {
		i.complain("a lifecycle hook uses up the grace period")
	}
	d := &i.m.deployment.Spec
	if i.cfg.Engine.Kind == config.EngineTRTLLM && (d.ProgressDeadlineSeconds == nil || *d.ProgressDeadlineSeconds < 3600) {
		i.complain("a rollout does not wait for an engine that loads")
	}
	if d.Strategy.Type != appsv1.RollingUpdateDeploymentStrategyType || d.Strategy.RollingUpdate == nil {
		i.complain("the strategy is not a rolling update with numbers")
	}
}

// resources checks that there is a GPU for every rank, and memory for what counts as such.
func (i *inspection) resources() {
	r := &i.c.Resources
	ranks := int64(0)
	if t := &i.cfg.Engine.TRTLLM; i.cfg.Engine.Kind == config.EngineTRTLLM {
		ranks = int64(t.TensorParallelSize * t.PipelineParallelSize)
	}
	limit, request := r.Limits[gpuResource], r.Requests[gpuResource]
	want(i, "limit of GPUs", limit.Value(), ranks)
	want(i, "request of GPUs", request.Value(), ranks)
	tolerated := slices.ContainsFunc(i.spec.Tolerations, func(t corev1.Toleration) bool {
		return t.Key == string(gpuResource) && t.Operator == corev1.TolerationOpExists
	})
	want(i, "toleration of GPU nodes", tolerated, ranks > 0)
	if r.Requests.Cpu().IsZero() || r.Requests.Memory().IsZero() || r.Limits.Memory().IsZero() {
		i.complain("no request of CPU and memory, or no limit of memory")
	}
	shared := i.emptyDir("/dev/shm")
	if shared == nil || shared.Medium != corev1.StorageMediumMemory || shared.SizeLimit == nil {
		i.complain("/dev/shm is not memory of a known size")
		return
	}
	half := resource.NewQuantity(r.Limits.Memory().Value()/2, resource.BinarySI)
	if shared.SizeLimit.Cmp(*half) > 0 {
		i.complain("/dev/shm of %v could take more than half of the container's memory", shared.SizeLimit)
	}
}

// emptyDir is the volume that is mounted at a path, if it is one of the pod's own.
func (i *inspection) emptyDir(mountPath string) *corev1.EmptyDirVolumeSource {
	for _, m := range i.c.VolumeMounts {
		if v := volume(i.spec, m.Name); m.MountPath == mountPath && !m.ReadOnly && v != nil {
			return v.EmptyDir
		}
	}
	return nil
}

// files checks that there is a place for everything that is written, and that what is read is mounted.
func (i *inspection) files() {
	for _, p := range []string{"/tmp", i.image.home} {
		if v := i.emptyDir(p); v == nil || v.SizeLimit == nil {
			i.complain("%s is not a writable volume of limited size", p)
		}
	}
	mounted := false
	for _, m := range i.c.VolumeMounts {
		v := volume(i.spec, m.Name)
		switch {
		case v == nil:
			i.complain("volume %q does not exist", m.Name)
		case v.EmptyDir == nil && !m.ReadOnly:
			i.complain("%s can be written to", m.MountPath)
		case v.PersistentVolumeClaim != nil && strings.HasPrefix(i.cfg.Model.Path, m.MountPath+"/"):
			mounted = true
		}
	}
	// The simulated engine's tokenizer is part of its image.
	want(i, "model on a mounted volume", mounted, i.cfg.Engine.Kind == config.EngineTRTLLM)
	if i.cfg.Engine.Kind == config.EngineTRTLLM {
		config := "--config=" + i.image.cmd[len(i.image.cmd)-1]
		want(i, "configuration file where the image expects it", slices.Contains(i.c.Args, config), true)
	} else {
		want(i, "folder of the image's model", path.Dir(path.Dir(i.cfg.Model.Path)), path.Dir(path.Dir(i.image.cmd[len(i.image.cmd)-1])))
	}
}

// rights checks that the container can do no more than it has to.
func (i *inspection) rights() {
	s := i.c.SecurityContext
	if s == nil || s.Capabilities == nil || s.ReadOnlyRootFilesystem == nil || s.AllowPrivilegeEscalation == nil {
		i.complain("no security context, or an incomplete one")
		return
	}
	want(i, "read-only root", *s.ReadOnlyRootFilesystem, true)
	want(i, "escalation of privileges", *s.AllowPrivilegeEscalation, false)
	want(i, "capabilities", slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) && len(s.Capabilities.Add) == 0, true)
	want(i, "privileged", s.Privileged == nil, true)
	if p := i.spec.SecurityContext.SeccompProfile; p == nil || p.Type != corev1.SeccompProfileTypeRuntimeDefault {
		i.complain("no seccomp profile")
	}
	want(i, "host's namespaces", i.spec.HostNetwork || i.spec.HostPID || i.spec.HostIPC, false)
}

func TestManifestsFitTheWorker(t *testing.T) {
	images := images(t)
	for name, text := range manifests(t) {
		t.Run(name, func(t *testing.T) { require.Empty(t, inspect(text, images)) })
	}
}

// TestImagesStartTheWorker: both images run the binary under an init that leaves its children to it, with arguments that the worker takes.
func TestImagesStartTheWorker(t *testing.T) {
	for name, image := range images(t) {
		require.Equal(t, []string{"/usr/bin/tini", "--", "/usr/local/bin/worker"}, image.entryPoint, name)
		require.Equal(t, []string{"serve", "--config"}, image.cmd[:2], name)
		require.Equal(t, "10001:10001", image.user, name)
		require.NotEmpty(t, image.home, name)
		var out strings.Builder
		p := &cli.Process{Args: []string{"serve", "--help"}, Stdout: &out, Stderr: &out}
		require.NotZero(t, p.Run())
		require.Contains(t, out.String(), "--config", name)
	}
}
