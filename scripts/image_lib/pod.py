"""A manifest's pod, as far as a kubelet has a part in it."""

import json
import re

from .kernel import bind, run

# What the downward API fills in.
FIELDS = {"status.podIP": "127.0.0.1", "metadata.uid": "0b6f8f0e-7a55-4a4e-9a0c-2f1d5a4f5f11"}


class Pod:
    """The only container of a manifest's deployment, with its config maps."""

    def __init__(self, repo, path):
        text = run("go", "-C", repo / "tools", "run", "./manifestjson", repo / path)
        docs = json.loads(text[text.index("["):])
        self._configs = {d["metadata"]["name"]: d["data"] for d in docs if d["kind"] == "ConfigMap"}
        [deployment] = [d for d in docs if d["kind"] == "Deployment"]
        self._spec = deployment["spec"]["template"]["spec"]
        [self._container] = self._spec["containers"]
        self.grace = self._spec["terminationGracePeriodSeconds"]
        self.env = {e["name"]: e["value"] if "value" in e else FIELDS[e["valueFrom"]["fieldRef"]["fieldPath"]] for e in self._container["env"]}
        self.args = [re.sub(r"\$\((\w+)\)", lambda m: self.env[m[1]], a) for a in self._container["args"]]

    def mount(self, view, folder, model):
        """Puts config maps, and the folder model for every claim's models, where the container mounts them. mount_points have to exist."""
        for path, name in self._mounts("configMap", "name"):
            source = folder / f"config-{name}"
            source.mkdir()
            for file, text in self._configs[name].items():
                (source / file).write_text(text)
            bind(source, view / path.lstrip("/"), readonly=True)
        for path, _ in self._mounts("persistentVolumeClaim", "claimName"):
            # The claim's folder of the model's name; the view below is read-only, so it is made on a file system of its own.
            run("mount", "-t", "tmpfs", "tmpfs", view / path.lstrip("/"))
            bind(model, view / self._model_path().lstrip("/"), readonly=True)

    def _model_path(self):
        """model.path of the worker's configuration."""
        [path] = {m[1] for c in self._configs.values() for m in re.finditer(r"(?m)^model:\n(?: +.*\n)*? +path: (\S+)$", c["worker.yaml"])}
        return path

    def mount_points(self):
        return [path for kind, key in (("configMap", "name"), ("persistentVolumeClaim", "claimName")) for path, _ in self._mounts(kind, key)]

    def _mounts(self, kind, key):
        volumes = {v["name"]: v[kind][key] for v in self._spec["volumes"] if kind in v}
        return [(m["mountPath"], volumes[m["name"]]) for m in self._container["volumeMounts"] if m["name"] in volumes]

    def probe(self, kind):
        """URL of a probe, and the seconds after which its failure counts."""
        probe = self._container[f"{kind}Probe"]
        ports = {p["name"]: p["containerPort"] for p in self._container["ports"]}
        get = probe["httpGet"]
        return f"http://127.0.0.1:{ports[get['port']]}{get['path']}", probe["periodSeconds"] * probe["failureThreshold"]

    def hosts(self):
        """Names that the pod's addresses need, all of them on this machine."""
        return sorted(set(re.findall(r"//([a-z][a-z0-9-]*):", " ".join(self.env.values()))))
