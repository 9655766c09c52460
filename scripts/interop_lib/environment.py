"""The environment that children get.

Settings of the runtime that happen to be exported where the harness is run
must not decide what is checked.
"""

import os

RUNTIME_PREFIXES = ("DYN_", "ETCD_", "NATS_", "OTEL_", "HF_", "CUDA_", "NVIDIA_")


def clean(**extra):
    env = {k: v for k, v in os.environ.items() if not k.startswith(RUNTIME_PREFIXES)}
    env.update({k: str(v) for k, v in extra.items()})
    return env
