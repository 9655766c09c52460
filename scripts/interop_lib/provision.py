"""What has to be on the machine before anything can be checked.

Installs the etcd and NATS servers when they are missing (Debian, root), makes
a cached virtual environment with the frontend, and builds the daemon.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

DYNAMO = ["ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"]

# Dynamo declares more than its frontend imports, among it a package that is
# not always available. So the two wheels come without dependencies, and these
# are what the frontend needs at run time.
FRONTEND_NEEDS = [
    "pydantic>=2.10.6,<=2.13.5", "uvloop>=0.21", "aiohttp>=3.14.3,<4", "certifi",
    "kubernetes>=32.0.1,<33", "msgspec", "prometheus-client>=0.23.1,<1", "pyzmq>=26",
    "redis>=6.2,<9", "tqdm", "transformers>=4.56", "typing-extensions", "zstandard",
]

# Commands that the checks need, and the Debian package of each.
COMMANDS = {"etcd": "etcd-server", "etcdctl": "etcd-client", "nats-server": "nats-server"}


class ProvisionError(Exception):
    """The machine lacks something and it could not be installed."""


def _run(argv, what, **kwargs):
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          stdin=subprocess.DEVNULL, text=True, errors="replace", **kwargs)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise ProvisionError(f"{what} failed with exit code {done.returncode}:\n{tail}")
    return done.stdout


def find(command):
    """Path of a command, also from the folder of system programs."""
    return shutil.which(command) or shutil.which(command, path="/usr/sbin:/sbin:/usr/local/sbin")


def servers(say):
    """Makes sure that etcd, etcdctl and nats-server exist."""
    commands(COMMANDS, say)


def commands(needed, say):
    """Makes sure that commands exist; needed has the Debian package of each."""
    missing = sorted({pkg for cmd, pkg in needed.items() if not find(cmd)})
    if not missing:
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        raise ProvisionError(f"please install {', '.join(missing)}")
    say(f"installing {', '.join(missing)}")
    # The packages would start services of their own, which the checks must
    # neither meet nor stop.
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive", RUNLEVEL="1")
    _run(["apt-get", "update", "-q"], "apt-get update", env=env)
    _run(["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing], "apt-get install", env=env)


def _base_python():
    """An interpreter that the Dynamo wheels accept."""
    if (3, 10) <= sys.version_info[:2] <= (3, 12):
        return sys.executable
    for name in ("python3.12", "python3.11", "python3.10"):
        if shutil.which(name):
            return shutil.which(name)
    raise ProvisionError("the Dynamo wheels need Python 3.10, 3.11 or 3.12")


def cache_dir():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "dynworker-interop"


def frontend_python(say):
    """Path of a Python that can run `-m dynamo.frontend`.

    The environment is kept between runs under a name that depends on the
    interpreter and on every requirement.
    """
    base = _base_python()
    version = _run([base, "-c", "import sys; print(sys.version, sys.prefix)"], "python").strip()
    key = hashlib.sha256(repr((version, DYNAMO, FRONTEND_NEEDS)).encode()).hexdigest()[:16]
    root = cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    venv = root / f"venv-{key}"
    stamp = venv / "complete"
    with open(root / f"venv-{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            say(f"making a virtual environment with {', '.join(DYNAMO)}")
            shutil.rmtree(venv, ignore_errors=True)
            _make_venv(base, venv)
            pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            _run([*pip, "--no-deps", *DYNAMO], "pip install of Dynamo")
            _run([*pip, *FRONTEND_NEEDS], "pip install of the frontend's dependencies")
            stamp.touch()
    return venv / "bin" / "python"


def _make_venv(base, venv):
    try:
        _run([base, "-m", "venv", str(venv)], "python -m venv")
    except ProvisionError:
        # Debian keeps ensurepip in a package of its own.
        if not shutil.which("apt-get") or os.geteuid() != 0:
            raise
        _run(["apt-get", "install", "-q", "-y", "python3-venv"], "apt-get install python3-venv",
             env=dict(os.environ, DEBIAN_FRONTEND="noninteractive"))
        shutil.rmtree(venv, ignore_errors=True)
        _run([base, "-m", "venv", str(venv)], "python -m venv")


def worker_binary(repo, out):
    """Builds the daemon into the file out."""
    return go_binary(repo, "./cmd/worker", out)


def go_binary(repo, package, out):
    """Builds a command of the repository into the file out."""
    env = dict(os.environ)
    # The NVML headers use deprecated declarations; their warnings say nothing about this project.
    env.setdefault("CGO_CFLAGS", "-Wno-deprecated-declarations")
    _run(["go", "build", "-o", str(out), package], f"go build {package}", cwd=repo, env=env)
    return Path(out)
