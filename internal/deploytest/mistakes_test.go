package deploytest

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// mistakes are changes to a manifest that look harmless, and a part of the complaint that has to follow.
var mistakes = []struct{ file, from, to, complaint string }{
	{"trtllm.yaml", "terminationGracePeriodSeconds: 420", "terminationGracePeriodSecond: 420", "unknown field"},
	{"trtllm.yaml", "terminationGracePeriodSeconds: 420", "terminationGracePeriodSeconds: 60", "grace period"},
	{"trtllm.yaml", "terminationGracePeriodSeconds: 420", "terminationGracePeriodSeconds: 3600", "far more"},
	{"trtllm.yaml", `value: "300"`, `value: "600"`, "grace period"},
	{"trtllm.yaml", "stop_timeout: 30s", "stop_timeout: 2m", "grace period"},
	{"trtllm.yaml", "      - name: worker\n", "      - name: worker\n        lifecycle:\n          preStop:\n            exec:\n              command: [sleep, \"5\"]\n", "lifecycle hook"},
	{"trtllm.yaml", `value: "9090"`, `value: "9095"`, "port system"},
	{"trtllm.yaml", `value: "9090"`, `value: "9091"`, "is also system.port"},
	{"trtllm.yaml", `value: "9091"`, `value: "9092"`, "port requests"},
	{"trtllm.yaml", "      - name: worker\n", "      - name: Worker\n", "lower case"},
	{"trtllm.yaml", "- name: requests", "- name: tcp-request-plane", "must be no more than"},
	{"trtllm.yaml", "path: /health", "path: /live", "readiness probe's path"},
	{"trtllm.yaml", "port: system", "port: requests", "startup probe's port"},
	{"trtllm.yaml", "failureThreshold: 3\n", "failureThreshold: 1\n", "liveness probe gives up"},
	{"trtllm.yaml", "livenessProbe:", "livenessProbes:", "unknown field"},
	{"trtllm.yaml", "DYN_TCP_RPC_PORT", "DYN_TCP_PORT", "DYN_TCP_PORT sets nothing"},
	{"trtllm.yaml", "DYN_STABLE_ROUTING_ID", "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", "sets nothing"},
	{"trtllm.yaml", "name: POD_IP", "name: POD_ADDRESS", "variable that is not set"},
	{"trtllm.yaml", "fieldPath: status.podIP", "fieldPath: status.podIPs", "do not know"},
	{"trtllm.yaml", "stop_timeout:", "stop_timeouts:", "stop_timeouts"},
	{"trtllm.yaml", "extra_engine_args: engine.yaml", "extra_engine_args: engines.yaml", "engines.yaml"},
	{"trtllm.yaml", "tensor_parallel_size: 1", "tensor_parallel_size: 4", "limit of GPUs"},
	{"trtllm.yaml", "- key: nvidia.com/gpu", "- key: nvidia.com/gpus", "toleration"},
	{"trtllm.yaml", "sizeLimit: 16Gi", "sizeLimit: 48Gi", "/dev/shm"},
	{"trtllm.yaml", "medium: Memory", "medium: \"\"", "/dev/shm"},
	{"trtllm.yaml", "mountPath: /tmp", "mountPath: /scratch", "/tmp"},
	{"trtllm.yaml", "mountPath: /home/worker", "mountPath: /root", "/home/worker"},
	{"trtllm.yaml", "mountPath: /models\n          readOnly: true", "mountPath: /models", "can be written to"},
	{"trtllm.yaml", "mountPath: /models", "mountPath: /model", "model on a mounted volume"},
	{"trtllm.yaml", "name: models\n          mountPath", "name: weights\n          mountPath", "does not exist"},
	{"trtllm.yaml", "dynworker:dev", "dynworker:latest", "not one that the Dockerfile builds"},
	{"trtllm.yaml", "dynworker:dev", "dynworker-sim:dev", "engine is trtllm"},
	{"trtllm.yaml", "        args:\n", "        command: [/bin/sh, -c]\n        args:\n", "entry point"},
	{"trtllm.yaml", "        - serve\n", "", "begin with serve"},
	{"trtllm.yaml", "runAsUser: 10001", "runAsUser: 1000", "user is"},
	{"trtllm.yaml", "runAsNonRoot: true", "runAsNonRoot: false", "not root"},
	{"trtllm.yaml", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "read-only root"},
	{"trtllm.yaml", "allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true", "escalation"},
	{"trtllm.yaml", "            - ALL", "            - NET_RAW", "capabilities"},
	{"trtllm.yaml", "type: RuntimeDefault", "type: Unconfined", "seccomp"},
	{"trtllm.yaml", "enableServiceLinks: false", "enableServiceLinks: true", "Services"},
	{"trtllm.yaml", "      automountServiceAccountToken: false", "      automountServiceAccountToken: true", "token"},
	{"trtllm.yaml", "serviceAccountName: dynworker", "serviceAccountName: worker", "service account"},
	{"trtllm.yaml", "progressDeadlineSeconds: 7200", "progressDeadlineSeconds: 600", "rollout"},
	{"trtllm.yaml", "maxUnavailable: 1\n  selector", "maxUnavailable: 0\n  selector", "emptied"},
	{"trtllm.yaml", "kind: PodDisruptionBudget", "kind: PodDisruptionBudgets", "nothing is known"},
	{"trtllm.yaml", "        configMap:\n          name: dynworker", "        configMap:\n          name: config", "is not in the file"},
	{"trtllm.yaml", "        - name: ETCD_ENDPOINTS\n          value: http://dynamo-platform-etcd:2379\n", "", "etcd.endpoints is not set"},
	{"sim.yaml", "        - name: NATS_SERVER\n          value: nats://dynamo-platform-nats:4222\n", "", "nats.server"},
	{"sim.yaml", "vocab_size: 355", "vocabulary: 355", "vocabulary"},
	{"sim.yaml", "terminationGracePeriodSeconds: 150", "terminationGracePeriodSeconds: 60", "grace period"},
	{"sim.yaml", "path: /usr/share/dynworker/testdata/model", "path: /testdata/model", "folder of the image's model"},
	{"sim.yaml", "            memory: 1Gi", "            memory: 1Gi\n            nvidia.com/gpu: 1", "limit of GPUs"},
	{"sim.yaml", "  template:", "  template:\n    metadata: {}", "already set"},
}

// TestChecksSeeMistakes holds the checks to what they are for.
func TestChecksSeeMistakes(t *testing.T) {
	images, texts := images(t), manifests(t)
	for _, m := range mistakes {
		t.Run(m.file+" "+strings.TrimSpace(m.to), func(t *testing.T) {
			text := texts[m.file]
			require.True(t, strings.Contains(text, m.from), "the manifest has no %q", m.from)
			problems := inspect(strings.Replace(text, m.from, m.to, 1), images)
			require.Contains(t, strings.Join(problems, "\n"), m.complaint)
		})
	}
}
