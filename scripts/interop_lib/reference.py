"""The text of an undisturbed run.

The simulated engine's next token is a function of the sequence so far, so a
worker that nothing happens to gives the text that every disturbed request
must have too. The reference worker runs on a stack of its own, without delay.
"""

import threading

from .report import CheckFailed
from .stack import Stack


class Reference:
    def __init__(self, setup):
        self._lock = threading.Lock()
        self._known = {}
        stack = Stack(setup, "reference", "nats")
        worker = stack.worker(engine__sim__token_delay="0s")
        self._api = stack.frontend().api
        stack.wait_served(self._api, [worker])

    def answer(self, prompt, tokens, **fields):
        """Body of the answer to a completions request with max_tokens tokens."""
        key = (prompt, tokens, repr(sorted(fields.items())))
        with self._lock:
            if key not in self._known:
                answer = self._api.post("/v1/completions",
                                        {"model": "tiny", "prompt": prompt, "max_tokens": tokens, **fields})
                if answer.status != 200:
                    raise CheckFailed(f"the reference run failed: {answer}")
                self._known[key] = answer.body
            return self._known[key]

    def text(self, prompt, tokens):
        """The text of exactly that many tokens, whether EOS is among them or not."""
        return self.answer(prompt, tokens, ignore_eos=True)["choices"][0]["text"]
