"""Carries out the steps of a plan (tools/dockersteps) in folders."""

import os
import shlex
import shutil

from .bases import proxies
from .kernel import bind, run


class Builder:
    """Builds the stages of plans, one folder each."""

    def __init__(self, processes, context, folder, bases, caches, say):
        self._processes = processes
        self._context = context
        self._folder = folder
        self._bases = bases
        self._caches = caches  # folders of this machine that stand in for caches of the build
        self._say = say
        self._roots = {}
        self._warming = []

    def warm(self, plan):
        """Begins to compile on this machine what a step will compile, so that the step finds it in its cache.

        It saves time while base images are made, and nothing depends on it: the step runs all the same.
        """
        for stage in plan["stages"]:
            for step in stage["steps"]:
                words = shlex.split(step["run"]["argv"][-1]) if "run" in step else []
                if words[:2] == ["go", "build"] and "-o" in words:
                    words[words.index("-o") + 1] = str(self._folder / "warm")
                    env = {**os.environ, **dict(kv.split("=", 1) for kv in step["run"]["env"])}
                    self._warming.append(self._processes.start(words, self._folder / "warm.log", env, self._context))

    def build(self, plan):
        """Builds the stages that are not there yet and returns the folder of the last one."""
        for stage in plan["stages"]:
            if stage["name"] in self._roots:
                continue
            base = self._bases.find(stage["base"])
            root = self._folder / stage["name"]
            base.unpack(root)
            self._roots[stage["name"]] = root
            for step in stage["steps"]:
                self._say(f"Dockerfile:{step['line']} {describe(step)}")
                self._step(step, root, base, plan["context"])
        return self._roots[plan["stages"][-1]["name"]]

    def _step(self, step, root, base, context):
        if "run" in step:
            self._run(step["run"], root, base)
        elif "copy" in step:
            self._copy(step["copy"], root, context)
        else:
            inside(root, step["workdir"]).mkdir(parents=True, exist_ok=True)

    def _run(self, step, root, base):
        mounts = [root / "proc"]
        run("mount", "-t", "proc", "proc", root / "proc")
        try:
            base.mount(root)
            for cache in step["caches"]:
                source = self._caches.get(cache) or self._folder / ("cache" + cache.replace("/", "_"))
                os.makedirs(source, exist_ok=True)
                bind(source, inside(root, cache))
                mounts.append(inside(root, cache))
            while step["caches"] and self._warming:
                self._warming.pop().wait(None)
            env = {**base.env, "HOME": "/root", **dict(kv.split("=", 1) for kv in step["env"])}
            # What builds is told how to reach its network; modules are on this machine already.
            env.update(proxies(), DEBIAN_FRONTEND="noninteractive", GOPROXY="off")
            user = ["--userspec", step["user"]] if step["user"] else []
            run("chroot", *user, root, "/usr/bin/env", f"--chdir={step['workdir']}", *step["argv"], env=env)
        finally:
            for m in reversed(mounts):
                run("umount", m)
            if os.path.ismount(root / "usr/local/go"):
                run("umount", root / "usr/local/go")

    def _copy(self, step, root, context):
        dest = inside(root, step["dest"])
        folder = step["dest"].endswith("/") or len(step["sources"]) > 1
        for source in step["sources"]:
            for name, relative in self._files(step["from"], source, context):
                into = dest / relative if relative else (dest / name.name if folder or dest.is_dir() else dest)
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(name, into, follow_symlinks=False)
                os.chown(into, 0, 0, follow_symlinks=False)

    def _files(self, stage, source, context):
        """Pairs of a file and its place in the folder that is copied; none for a file by itself."""
        if stage:
            name = inside(self._roots[stage], source)
            if name.is_dir():
                for f in sorted(p for p in name.rglob("*") if not p.is_dir()):
                    yield f, f.relative_to(name)
            else:
                yield name, None
            return
        source = os.path.normpath(source)
        found = False
        for f in context:
            if source == "." or f.startswith(source + "/"):
                found = True
                yield self._context / f, os.path.relpath(f, source)
            elif f == source:
                found = True
                yield self._context / f, None
        if not found:
            raise FileNotFoundError(f"{source} is not in the build's context")


def inside(root, path):
    return root / path.lstrip("/")


def describe(step):
    if "run" in step:
        return "RUN " + " ".join(step["run"]["argv"][-1].split())[:90]
    if "copy" in step:
        c = step["copy"]
        return "COPY " + (f"--from={c['from']} " if c["from"] else "") + " ".join([*c["sources"], c["dest"]])
    return "WORKDIR " + step["workdir"]
