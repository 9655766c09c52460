"""The HTTP client of the frontend: whole answers and streams."""

import http.client
import json
import socket
import time


class Answer:
    """A whole HTTP answer. body is the decoded JSON, or the text if it is none."""

    def __init__(self, status, text):
        self.status = status
        self.text = text
        try:
            self.body = json.loads(text)
        except ValueError:
            self.body = text

    def __str__(self):
        return f"HTTP {self.status} {self.text.strip()[:300]}"


class Api:
    """The OpenAI routes of a frontend on the loopback interface."""

    def __init__(self, port, timeout=120):
        self.port = port
        self._timeout = timeout

    def get(self, path):
        return self._whole("GET", path, None, None)

    def post(self, path, body, headers=None):
        return self._whole("POST", path, body, headers)

    def models(self):
        """Names of the models listed, or None if there is no proper answer."""
        answer = self.get("/v1/models")
        return [m["id"] for m in answer.body["data"]] if answer.status == 200 else None

    def stream(self, path, body, headers=None):
        return Stream(self.port, path, dict(body, stream=True), headers, self._timeout)

    def _whole(self, method, path, body, headers):
        conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self._timeout)
        try:
            conn.request(method, path, None if body is None else json.dumps(body),
                         {"Content-Type": "application/json", **(headers or {})})
            answer = conn.getresponse()
            return Answer(answer.status, answer.read().decode(errors="replace"))
        except http.client.HTTPException as err:
            raise OSError(f"{method} {path}: {err!r}") from err
        finally:
            conn.close()


class Stream:
    """An open event stream.

    collect() reads to the end; text, finish, usage, error and done then say
    what came. arrivals holds the time of each event that carried text.
    """

    def __init__(self, port, path, body, headers, timeout):
        self._conn = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        self.text = ""
        self.finish = None
        self.usage = None
        self.error = None
        self.done = False
        self.raw = []
        self.arrivals = []
        self._conn.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        self._socket = self._conn.sock
        self._answer = self._conn.getresponse()
        self.status = self._answer.status
        if self.status != 200:
            self.error = Answer(self.status, self._answer.read().decode(errors="replace"))
            self._conn.close()

    def next(self):
        """Reads one event and returns its decoded data, or None at the end."""
        while self.status == 200:
            line = self._answer.readline()
            if not line:
                return None
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip().decode()
            self.raw.append(data)
            if data == "[DONE]":
                self.done = True
                return None
            event = json.loads(data)
            self._note(event)
            return event
        return None

    def _note(self, event):
        if "error" in event:
            self.error = event["error"]
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or []:
            piece = choice.get("text") or choice.get("delta", {}).get("content")
            if piece:
                self.text += piece
                self.arrivals.append(time.monotonic())
            self.finish = choice.get("finish_reason") or self.finish

    def collect(self):
        try:
            while self.next() is not None:
                pass
        except (OSError, http.client.HTTPException) as err:
            self.error = self.error or repr(err)
        self._conn.close()
        return self

    def hang_up(self):
        """Ends the connection as a client that is gone. Returns the time."""
        now = time.monotonic()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._conn.close()
        self._answer.close()
        return now

    def whole(self):
        """None if the stream ended as a complete answer, else what is wrong with it."""
        if self.error:
            return f"error {self.error}"
        if not self.done:
            return f"no [DONE] after {len(self.text)} characters"
        if not self.finish:
            return f"no finish reason after {len(self.text)} characters"
        return None
