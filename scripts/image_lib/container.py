"""Starts an image's entry point as a container runtime would."""

import os
import subprocess
from pathlib import Path

from interop_lib.procs import wait_for

from .bases import PATH
from .kernel import bind, run

# As the volumes of configs/k8s: everything else is read-only.
WRITABLE = ("tmp", "home/worker", "dev/shm")


class Image:
    """A built root file system and how it is started."""

    def __init__(self, root, image, folder, mount_points=()):
        self.image = image
        self.view = folder / f"view-{root.name}"
        # A runtime makes what it mounts something on.
        for name in (*WRITABLE, *(p.lstrip("/") for p in mount_points)):
            (root / name).mkdir(parents=True, exist_ok=True)
        (root / "etc/hosts").touch()
        bind(root, self.view, readonly=True)
        for name in WRITABLE:
            run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", self.view / name)
        run("mount", "-t", "proc", "proc", self.view / "proc")
        self.env = {"PATH": PATH, **dict(kv.split("=", 1) for kv in image["env"])}

    def enter(self, argv, env):
        """The command line that runs argv in the image."""
        settings = [f"{k}={v}" for k, v in {**self.env, **env}.items()]
        return ["setpriv", "--no-new-privs", "chroot", f"--userspec={self.image['user']}", "--groups=", self.view,
                "/usr/bin/env", "-i", f"--chdir={self.image['workdir']}", *settings, *argv]

    def command(self, argv, env, timeout=60, beside=None):
        """Runs another command in the image and returns exit code and output; beside a process it shares its namespaces, as with kubectl exec."""
        enter = ["nsenter", "--pid", "--mount", "--target", beside] if beside else []
        done = subprocess.run([str(a) for a in [*enter, *self.enter(argv, env)]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=timeout)
        return done.returncode, done.stdout

    def resolve(self, names, folder):
        """Makes names known that mean this machine."""
        hosts = folder / f"hosts-{self.view.name}"
        hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *names)))
        run("mount", "--bind", hosts, self.view / "etc/hosts")

    def start(self, processes, log, env, own_pids, args=None):
        """Starts the entry point with args, or else with the image's own. With own_pids it is PID 1 of a namespace, which the kernel clears when it ends."""
        argv = self.enter([*self.image["entrypoint"], *(args or self.image["cmd"])], env)
        if own_pids:
            argv = ["unshare", "--pid", "--fork", "--kill-child", f"--mount-proc={self.view / 'proc'}", *argv]
        return Container(self, processes.start(argv, log), own_pids)

    def running(self):
        """Processes that have the image as their root: {pid: name}."""
        out = {}
        for p in Path("/proc").iterdir():
            if not p.name.isdigit():
                continue
            try:
                if os.readlink(p / "root") == str(self.view):
                    out[int(p.name)] = (p / "comm").read_text().strip()
            except OSError:
                pass  # it has just ended
        return out


class Container:
    """A started image."""

    def __init__(self, image, process, own_pids):
        self.process = process
        self._image = image
        self._own_pids = own_pids

    def first(self):
        """The entry point's process, seen from outside."""
        if not self._own_pids:
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(wait_for("the first process", 20, lambda: children.read_text().split())[0])
