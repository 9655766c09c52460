"""Streams that are open while something happens, and requests that go on meanwhile."""

import threading
import time

from .procs import wait_for
from .report import CheckFailed


class OpenStreams:
    """A few long completions, opened together and read by a thread each."""

    def __init__(self, api, name, count, tokens):
        self._tokens = tokens
        self._prompts = [f"{name}, stream {i}: " for i in range(count)]
        self._streams = [api.stream("/v1/completions", {
            "model": "tiny", "prompt": p, "max_tokens": tokens, "ignore_eos": True}) for p in self._prompts]
        self._threads = [threading.Thread(target=s.collect, daemon=True) for s in self._streams]
        for thread in self._threads:
            thread.start()
        wait_for("text on every stream", 20, lambda: all(s.text or s.error for s in self._streams))

    def still_open(self):
        return all(t.is_alive() for t in self._threads)

    def finish(self, reference, timeout):
        """Waits for the ends and compares the texts. Returns a remark, or raises CheckFailed."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))
        for prompt, stream, thread in zip(self._prompts, self._streams, self._threads):
            if thread.is_alive():
                raise CheckFailed(f"a stream did not end, {len(stream.text)} characters came")
            if stream.whole():
                raise CheckFailed(f"a stream broke: {stream.whole()}")
            compare(stream.text, reference.text(prompt, self._tokens))
        return f"{len(self._streams)} streams of {self._tokens} tokens whole"


def compare(text, wanted):
    """Raises CheckFailed telling where text leaves the wanted one."""
    if text == wanted:
        return
    at = next((i for i, (a, b) in enumerate(zip(text, wanted)) if a != b), min(len(text), len(wanted)))
    raise CheckFailed(f"text differs from that of an undisturbed run at character {at} "
                      f"(length {len(text)}, wanted {len(wanted)}): {text[at:at + 20]!r}, wanted {wanted[at:at + 20]!r}")


class Traffic:
    """Streamed requests from several clients, one after another each, until stop()."""

    def __init__(self, api, name, clients, tokens):
        self._api = api
        self._name = name
        self._tokens = tokens
        self._lock = threading.Lock()
        self._next = 0
        self._stopping = threading.Event()
        self.results = []  # (prompt, Stream)
        self._threads = [threading.Thread(target=self._client, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _client(self):
        while not self._stopping.is_set():
            with self._lock:
                prompt = f"{self._name}, request {self._next}: "
                self._next += 1
            try:
                stream = self._api.stream("/v1/completions", {
                    "model": "tiny", "prompt": prompt, "max_tokens": self._tokens, "ignore_eos": True}).collect()
            except OSError as err:
                stream = Refused(err)
            with self._lock:
                self.results.append((prompt, stream))

    def stop(self):
        """Lets the open requests end and returns how many there were in all."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)
            if thread.is_alive():
                raise CheckFailed("a request did not end")
        return len(self.results)

    def compare(self, reference):
        """Raises CheckFailed unless every text is whole and equals that of an undisturbed run."""
        for prompt, stream in self.results:
            if stream.whole():
                raise CheckFailed(f"a request of {len(self.results)} broke: {stream.whole()}")
            compare(stream.text, reference.text(prompt, self._tokens))


class Refused:
    """Stands for a stream that could not even be opened."""

    text = ""

    def __init__(self, err):
        self._err = err

    def whole(self):
        return f"no answer: {self._err!r}"


class Probe:
    """A short request every half second until stop(), and a look at /live."""

    def __init__(self, api, worker):
        self._api = api
        self._worker = worker
        self._stopping = threading.Event()
        self.answered = 0
        self.failed = []
        self.not_live = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._stopping.is_set():
            try:
                answer = self._api.post("/v1/completions", {"model": "tiny", "prompt": "there?", "max_tokens": 2})
                if answer.status == 200:
                    self.answered += 1
                else:
                    self.failed.append(str(answer))
            except OSError as err:
                self.failed.append(repr(err))
            try:
                live = self._worker.status.get("/live")
                if live.status != 200:
                    self.not_live.append(str(live))
            except OSError as err:
                self.not_live.append(repr(err))
            self._stopping.wait(0.5)

    def stop(self):
        self._stopping.set()
        self._thread.join(130)
        if self.not_live:
            raise CheckFailed(f"/live failed {len(self.not_live)} times, first with {self.not_live[0]}")
        return self
