"""Stand-ins for base images, since no registry of images can be assumed.

debian:SUITE-slim becomes a minimal Debian of that suite. golang:VERSION-SUITE
becomes the same with a C compiler, and with the Go of this machine, which has
to be of that version. TensorRT-LLM's image becomes a Debian with Python and the
stand-in for tensorrt_llm that the bridge is tested with. All are kept for a week
between runs.
"""

import os
import re
import shutil
import time
from pathlib import Path

from .kernel import StepFailed, bind, run

KEPT = 7 * 24 * 3600
STANDIN = Path(__file__).resolve().parents[2] / "pkg/engine/bridge/testdata/standin"
PYTHON = "usr/local/lib/python3.11/dist-packages"  # of bookworm
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Base:
    """A root file system to copy, and what comes with it."""

    def __init__(self, archive, env, go=None, modules=None):
        self._archive = archive
        self.env = env
        self._go = go
        self._modules = modules

    def unpack(self, root):
        root.mkdir()
        run("tar", "--extract", "--numeric-owner", "--file", self._archive, "--directory", root)
        if self._modules:
            shutil.copytree(self._modules, root / PYTHON, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))

    def mount(self, root):
        """Mounts what is not part of the copy."""
        if self._go:
            bind(self._go, root / "usr/local/go", readonly=True)


class Bases:
    """Makes stand-ins by the names of images."""

    def __init__(self, say):
        self._say = say
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        self._folder = Path(cache) / "dynworker-image"
        self._folder.mkdir(parents=True, exist_ok=True)

    def find(self, image):
        if m := re.fullmatch(r"debian:(\w+)-slim", image):
            return Base(self._debian(m[1]), {"PATH": PATH})
        if m := re.fullmatch(r"golang:(\d+\.\d+)-(\w+)", image):
            go = Path(run("go", "env", "GOROOT").strip())
            version = run("go", "env", "GOVERSION").strip()
            if not version.startswith(f"go{m[1]}"):
                raise StepFailed(f"{image} is asked for, but this machine has {version}")
            env = {"PATH": f"/go/bin:/usr/local/go/bin:{PATH}", "GOPATH": "/go"}
            return Base(self._with(m[2], "gcc", "libc6-dev", "ca-certificates"), env, go)
        if image.startswith("nvcr.io/nvidia/tensorrt-llm/release:"):
            return Base(self._with("bookworm", "python3"), {"PATH": PATH}, modules=STANDIN)
        raise StepFailed(f"nothing stands in for the image {image}")

    def _kept(self, name, make):
        """The archive of that name, made anew when it is missing or old."""
        archive = self._folder / f"{name}.tar"
        if archive.exists() and time.time() - archive.stat().st_mtime < KEPT:
            return archive
        root = self._folder / f"{name}.{os.getpid()}"
        try:
            make(root)
            part = archive.with_suffix(f".part{os.getpid()}")
            run("tar", "--create", "--numeric-owner", "--file", part, "--directory", root, ".")
            part.rename(archive)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        return archive

    def _debian(self, suite):
        def make(root):
            self._say(f"debootstrap {suite}")
            run("debootstrap", "--variant=minbase", suite, root, *_mirror())
        return self._kept(suite, make)

    def _with(self, suite, *packages):
        plain = Base(self._debian(suite), {})

        def make(root):
            self._say(f"{packages[0]} for {suite}")
            plain.unpack(root)
            env = {"PATH": PATH, "DEBIAN_FRONTEND": "noninteractive", **proxies()}
            run("chroot", root, "apt-get", "update", "-q", env=env)
            run("chroot", root, "apt-get", "install", "-q", "-y", "--no-install-recommends", *packages, env=env)
            run("chroot", root, "apt-get", "clean", env=env)
        return self._kept(f"{suite}-{packages[0]}", make)


def _mirror():
    """Where this machine gets Debian from, or nothing for debootstrap's own choice."""
    out = run("apt-get", "indextargets", "--format", "$(SITE) $(ORIGIN) $(LABEL)", "Created-By: Packages")
    for line in out.splitlines():
        if line.endswith(" Debian Debian"):
            return [line.split()[0]]
    return []


def proxies():
    return {k: v for k, v in os.environ.items() if k.lower() in ("http_proxy", "https_proxy", "no_proxy")}
