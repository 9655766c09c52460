"""A worker as an operator sees it: metrics, health, log and processes."""

import json
import re

from interop_lib.report import CheckFailed

from . import host

_SAMPLE = re.compile(r'^(\w+)(?:\{(.*)\})? (\S+)$')
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Daemon:
    """Wraps a worker of interop_lib."""

    def __init__(self, worker):
        self.worker = worker
        self.process = worker.process
        self.pid = worker.process.pid
        self._log_from = 0

    # Metrics and health

    def metric(self, name, **labels):
        """The sum over the samples of a family that have these labels; 0 if there is none."""
        total = 0.0
        for line in self.worker.status.get("/metrics").text.splitlines():
            found = _SAMPLE.match(line)
            if found and found[1] == name:
                have = dict(_LABEL.findall(found[2] or ""))
                if all(have.get(k) == v for k, v in labels.items()):
                    total += float(found[3])
        return total

    def in_flight(self):
        return int(self.metric("dynamo_component_inflight_requests"))

    def accepted(self):
        return int(self.metric("dynamo_component_requests_total"))

    def failures(self, detector):
        return int(self.metric("dynworker_engine_failures_total", detector=detector))

    def ready(self):
        return self.worker.status.get("/health").status == 200

    def reasons(self):
        """Why /health is not 200: {part: reason}."""
        answer = self.worker.status.get("/health")
        if answer.status == 200 or not isinstance(answer.body, dict):
            return {}
        return {r["component"]: r["reason"] for r in answer.body.get("reasons") or []}

    def live(self):
        return self.worker.status.get("/live").status == 200

    # Log

    def mark_log(self):
        """What is logged from here on is what logged() looks at."""
        self._log_from = self.process.log.stat().st_size

    def logged(self, words):
        """The first log line since the mark whose text has these words, or None."""
        with open(self.process.log, "rb") as f:
            f.seek(self._log_from)
            for line in f.read().decode(errors="replace").splitlines():
                if words in line:
                    return line
        return None

    def message(self, words):
        """Like logged, as the decoded object."""
        line = self.logged(words)
        try:
            return json.loads(line) if line else None
        except ValueError:
            return {"message": line}

    # Processes

    def tree(self):
        """Everything that runs below the worker."""
        return host.descendants(self.pid)

    def engine(self):
        """The engine process itself."""
        for p in self.tree():
            words = p.command.split()
            # A keeper that stands between worker and engine names the engine's command, too.
            if "engine-keeper" not in words and ("engine-sim" in words or "/engine-program-" in p.command):
                return p
        raise CheckFailed(f"no engine among {[str(p) for p in self.tree()]}")
