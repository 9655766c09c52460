"""Frames on the socket to the worker.

A frame is a 32-bit payload length, one byte for the kind, and the payload; all integers are
little endian. Control payloads are JSON objects.
"""
import json
import os
import socket
import struct
import sys
import threading

PROTOCOL = 1
MAX_PAYLOAD = 64 << 20
ENV_DESCRIPTOR = "DYNWORKER_ENGINE_FD"

HELLO, CONFIGURE, PROGRESS, READY, GENERATE, CANCEL, OUTPUTS = range(1, 8)
STATS, EVENTS, QUERY, ANSWER, SHUTDOWN, GOODBYE, FATAL = range(8, 15)

_HEAD = struct.Struct("<IB")
_SEND_BUFFER = 4 << 20  # bytes the kernel may hold while the worker is busy


def warn(text):
    """A line for the worker's log. When the worker is gone there is no log, either."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        pass


class ProtocolError(Exception):
    """The worker sent something that is no frame, or not what was to come now."""


class Channel:
    """The socket. One thread reads; any thread may send."""

    def __init__(self, descriptor):
        os.set_inheritable(descriptor, False)
        self._sock = socket.socket(fileno=descriptor)
        self._sock.setblocking(True)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._source = self._sock.makefile("rb", 1 << 16)
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls):
        """Takes the descriptor that the worker passed. The variable goes, too: a rank that the
        engine spawns must not think that the channel is its own."""
        text = os.environ.pop(ENV_DESCRIPTOR, "")
        try:
            return cls(int(text))
        except (ValueError, OSError) as e:
            raise ProtocolError(
                f"{ENV_DESCRIPTOR} names no socket ({e}); this program is started by the "
                "worker and is of no use by itself") from None

    def read(self):
        """The next frame as (kind, payload), or None at the end of the stream."""
        head = self._source.read(_HEAD.size)
        if not head:
            return None
        if len(head) < _HEAD.size:
            raise ProtocolError("the stream ended inside a frame")
        size, kind = _HEAD.unpack(head)
        if size > MAX_PAYLOAD:
            raise ProtocolError(f"frame of {size} bytes is over the limit of {MAX_PAYLOAD}")
        payload = self._source.read(size)
        if len(payload) < size:
            raise ProtocolError("the stream ended inside a frame")
        return kind, payload

    def send(self, kind, payload):
        """Sends one frame; blocks while the worker does not read, which is all the flow control
        there is. A worker that is gone is no error here: the reading side notices."""
        frame = _HEAD.pack(len(payload), kind) + payload
        with self._lock:
            try:
                self._sock.sendall(frame)
            except OSError as e:
                warn(f"engine channel: send: {e}")

    def send_json(self, kind, value):
        self.send(kind, encode(value))


def encode(value):
    """JSON bytes. Infinities and NaN, which JSON lacks, become null; objects that nobody foresaw
    become their text."""
    try:
        return _json(value)
    except ValueError:
        return _json(_finite(value))


def _json(value):
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=repr).encode()


def _finite(value):
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


class Outbox:
    """Collects output records and sends those of one turn of the event loop as one frame."""

    def __init__(self, channel, loop):
        self._channel, self._loop, self._parts = channel, loop, []

    def add(self, record):
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(record)

    def flush(self):
        parts, self._parts = self._parts, []
        payload = b"".join(parts)
        if len(payload) <= MAX_PAYLOAD:
            parts = (payload,) if payload else ()
        for part in parts:
            self._channel.send(OUTPUTS, part)
