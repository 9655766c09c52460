"""One set of servers with everything that runs on it, in one folder."""

from . import model
from .frontend import Frontend, take_away
from .procs import wait_for
from .servers import Etcd, Nats
from .worker import Worker


class Setup:
    """What all stacks of a run share: the programs and the process table."""

    def __init__(self, processes, python, binary, folder, model_folder):
        self.processes = processes
        self.python = python
        self.binary = binary
        self.folder = folder
        self.model = model_folder


def make_model(folder):
    """The model folder of a run, which a frontend started with hidden= cannot read."""
    model.write(folder)
    take_away(folder)
    return folder


class Stack:
    """etcd and NATS, and the frontends and workers started on them."""

    def __init__(self, setup, name, plane):
        self.setup = setup
        self.plane = plane
        self.folder = setup.folder / name
        self.folder.mkdir(parents=True)
        self.etcd = Etcd(setup.processes, self.folder / "etcd").start()
        self.nats = Nats(setup.processes, self.folder / "nats").start()
        self.frontends = []
        self.workers = []

    def worker(self, wait=True, log=None, **settings):
        """Starts one more worker; a key is written with __ for each dot. wait=False does not wait until it is registered."""
        keys = {k.replace("__", "."): v for k, v in settings.items()}
        worker = Worker(self.setup.processes, self.setup.binary, self.folder / f"worker-{len(self.workers)}",
                        self.plane, self.etcd, self.nats, self.setup.model, keys, wait, log)
        self.workers.append(worker)
        return worker

    def frontend(self, *extra, **env):
        """Starts one more frontend, which cannot read the model folder."""
        frontend = Frontend(self.setup.processes, self.setup.python, self.folder / f"frontend-{len(self.frontends)}",
                            self.plane, self.etcd, self.nats, extra, env, hidden=self.setup.model)
        self.frontends.append(frontend)
        return frontend

    def wait_served(self, api, workers):
        """Waits until the frontend lists the model and each of the workers has answered a request.

        Being listed needs one worker; a second one takes part a little later,
        and nothing but an answered request shows it.
        """
        wait_for("the model to be listed", 30, lambda: "tiny" in (api.models() or []))
        before = [len(w.calls()) for w in workers]

        def each_answered():
            answer = api.post("/v1/completions", {"model": "tiny", "prompt": "ready?", "max_tokens": 1})
            return answer.status == 200 and all(len(w.calls()) > n for w, n in zip(workers, before))
        wait_for(f"answers from {len(workers)} worker(s)", 30, each_answered)

    def close(self):
        """Ends everything."""
        for part in [w.process for w in self.workers] + [f.process for f in self.frontends]:
            part.kill()
        for worker in self.workers:
            worker.files.close()
        self.nats.kill()
        self.etcd.kill()
