"""What an outcome is worth."""

from collections import Counter

# Seconds after a fault, or after the sending if that is later, in which every
# request must have its terminal answer. The number is the project's own rule.
PATIENCE = 30

FULL = "full"      # the whole text, as it must be
TYPED = "typed"    # an error that says what it is; the text before it was right
CUT = "cut"        # the connection was closed without an answer
LOST = "lost"      # no terminal answer in time
WRONG = "wrong"    # a text that is not what it must be, or an end that looks like one


def typed(status, error):
    """Whether an error says what it is: the frontend's form has a message with a type or a code.

    A frontend that knows no worker of any model has no such route at all, which
    is a 404 without a body.
    """
    if status == 404 and error == "":
        return True
    if isinstance(error, dict) and isinstance(error.get("error"), dict):
        error = error["error"]
    return isinstance(error, dict) and bool(error.get("message")) and bool(error.get("type") or error.get("code"))


def verdict(outcome, struck, expected):
    """Judges an outcome. struck is when the fault happened; expected gives a prompt's text."""
    o = outcome
    wanted = expected(o.prompt, o.tokens)
    if not wanted.startswith(o.text):
        return WRONG
    # Who left a request waiting for too long has lost it, however it ended.
    if o.ended is None or o.ended - max(o.sent, struck) > PATIENCE:
        return LOST
    if o.error is not None:
        return TYPED if typed(o.status, o.error) else WRONG
    if o.broken is not None:
        return CUT
    if o.done and o.text == wanted and o.finish == "length":
        return FULL
    # [DONE] after a part of the text, or the end of the stream without [DONE].
    return WRONG if o.done or o.finish else CUT


class Tally:
    """Outcomes by verdict, with one of each kind to look at."""

    def __init__(self, outcomes, struck, expected):
        self.counts = Counter()
        self.by_tag = Counter()
        self.samples = {}
        for o in outcomes:
            kind = verdict(o, struck, expected)
            self.counts[kind] += 1
            self.by_tag[o.tag, kind] += 1
            self.samples.setdefault((o.tag, kind), o)

    def __getitem__(self, kind):
        return self.counts[kind]

    def sample(self, kind, tag=None):
        """Some outcome of that kind, for a message."""
        for (t, k), outcome in self.samples.items():
            if k == kind and tag in (None, t):
                return str(outcome)
        return ""
