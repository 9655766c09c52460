"""One streamed request, from the socket to its end, whatever the end is.

Hundreds of these run in one thread, so it is asyncio and a few lines of HTTP
instead of http.client and threads.
"""

import asyncio
import json
import time


class Outcome:
    """A request and what has come of it so far. Times are of time.monotonic()."""

    __slots__ = ("tag", "prompt", "tokens", "salt", "worker", "sent", "first", "ended", "status", "text", "finish", "done", "error", "broken")

    def __init__(self, tag, prompt, tokens, salt=None, worker=None):
        self.tag = tag
        self.prompt = prompt
        self.tokens = tokens
        self.salt = salt
        self.worker = worker  # the only instance that may serve it
        self.sent = time.monotonic()
        self.first = None    # when the first text came
        self.ended = None    # None for as long as it is open
        self.status = None
        self.text = ""
        self.finish = None
        self.done = False    # [DONE] has come
        self.error = None    # the error that an answer or an event carried
        self.broken = None   # why the connection ended before an answer did

    def body(self):
        body = {"model": "tiny", "prompt": self.prompt, "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        if self.salt:
            body["nvext"] = {"cache_salt": self.salt}
        return body

    def __str__(self):
        return (f"{self.tag} {self.prompt!r} ({self.tokens} tokens): HTTP {self.status}, {len(self.text)} characters, "
                f"finish {self.finish}, error {self.error}, broken {self.broken}")


def request(outcome):
    """The bytes of its HTTP request."""
    body = json.dumps(outcome.body()).encode()
    pinned = b"x-dynamo-worker-instance-id: %d\r\n" % outcome.worker if outcome.worker else b""
    return (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\n%sContent-Length: %d\r\n\r\n%s" % (pinned, len(body), body))


class Connection:
    """The HTTP side of a streamed request."""

    def __init__(self, port, outcome):
        self.port = port
        self.outcome = outcome
        self._buffer = b""

    async def send(self):
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writer.write(request(self.outcome))

    async def head(self):
        """Reads status and headers; the body too if it is an error's."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        self.outcome.status = int(head.split(b" ", 2)[1])
        self._chunked = b"transfer-encoding: chunked" in head.lower()
        if self.outcome.status != 200:
            text = b"".join([part async for part in self._parts()])
            try:
                self.outcome.error = json.loads(text)
            except ValueError:
                self.outcome.error = text.decode(errors="replace")

    async def _parts(self):
        while True:
            if not self._chunked:
                part = await self._reader.read(65536)
                if not part:
                    return
                yield part
                continue
            size = int(await self._reader.readline() or b"x", 16)
            part = await self._reader.readexactly(size + 2)
            if not size:
                return
            yield part[:-2]

    async def events(self):
        """Yields after each event with data, having noted it in the outcome."""
        async for part in self._parts():
            *lines, self._buffer = (self._buffer + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._note(line[5:].strip())
                    yield

    def _note(self, data):
        o = self.outcome
        if data == b"[DONE]":
            o.done = True
            return
        event = json.loads(data)
        if "error" in event:
            o.error = event["error"]
        for choice in event.get("choices") or []:
            piece = choice.get("text")
            if piece:
                o.first = o.first or time.monotonic()
                o.text += piece
            o.finish = choice.get("finish_reason") or o.finish

    def hang_up(self):
        """Ends the connection hard, as a client that is gone."""
        if hasattr(self, "_writer"):
            self._writer.transport.abort()


async def ask(port, outcome, limit):
    """Sends the request and reads the answer for at most limit seconds. Never raises but for being cancelled."""
    connection = Connection(port, outcome)

    async def whole():
        await connection.send()
        await connection.head()
        if outcome.status == 200:
            async for _ in connection.events():
                pass
    try:
        await asyncio.wait_for(whole(), limit)
    except asyncio.TimeoutError:
        outcome.broken = f"given up after {limit} s"
    except (OSError, asyncio.IncompleteReadError, ValueError) as err:
        outcome.broken = repr(err)
    finally:
        connection.hang_up()
        outcome.ended = time.monotonic()
