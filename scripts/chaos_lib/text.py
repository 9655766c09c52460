"""The texts that engines must give, computed from their published rules.

Tokens are those of interop_lib.model: a character of printable ASCII is one
token, so texts and token ids can be turned into each other.
"""

from interop_lib import model

_MASK = (1 << 64) - 1
_FIRST = len(model.SPECIAL)
_COUNT = model.PRINTABLE - _FIRST
_IDS = {(" " if c == "\u0120" else c): _FIRST + i for i, c in enumerate(model.CHARACTERS)}
_CHARS = {i: c for c, i in _IDS.items()}

# The stand-in writes 7 ids further with every token. With a vocabulary of 14
# times 7 a text that begins with an id of the right residue keeps to printable
# characters and never meets a special token.
STANDIN_VOCABULARY = 98
_RESIDUE = _FIRST % 7


def ids(text):
    return [_IDS[c] for c in text]


def simulated(prompt, tokens):
    """The text of the simulated engine (pkg/engine/sim/token.go) that must not end by itself."""
    h = 0x243F6A8885A308D3
    for t in ids(prompt):
        h = ((h ^ t) * 0x9E3779B97F4A7C15) & _MASK
        h ^= h >> 32
    out = []
    for _ in range(tokens):
        x = ((h ^ (h >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
        x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK
        t = _FIRST + (x ^ (x >> 33)) % _COUNT
        out.append(_CHARS[t])
        h = ((h ^ t) * 0x9E3779B97F4A7C15) & _MASK
        h ^= h >> 32
    return "".join(out)


def standin(prompt, tokens):
    """The text of the stand-in for tensorrt_llm (its __init__.py) for a prompt of readable()."""
    base = sum(ids(prompt))
    return "".join(_CHARS[(base + 7 * k) % STANDIN_VOCABULARY] for k in range(tokens))


def readable(prompt):
    """The prompt, made such that the stand-in's answer to it is printable. It must be without spaces."""
    for end in "abcdefg":
        if sum(ids(prompt + end)) % 7 == _RESIDUE:
            return prompt + end
    raise AssertionError("seven letters in a row have seven residues")
