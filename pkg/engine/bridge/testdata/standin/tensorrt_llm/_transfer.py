"""The KV cache between a prefill and a decode engine, really sent from process to process.

A connection is one transfer. The receiver writes a line of JSON with context and nonce; the
sender answers with a line that has context and size, or an error, and then the content: for each
block its tokens and the sum of the prompt so far, which is all that the stand-in's text depends
on. When the receiver has found it right it writes a line, and the sender forgets the context.
"""
import asyncio
import json
import os
import socketserver
import threading
import time
import zlib

from ._record import log
from ._switch import TRANSFER_DELAY

LOST, CORRUPT, SILENT = 90017, 90018, 90019


class TransferError(Exception):
    """The KV cannot be had."""


class Held:
    """The KV of one prefilled prompt."""

    def __init__(self, context, rank, content, blocks, fault, until):
        self.context, self.rank, self.blocks = context, rank, blocks
        self.content, self.fault, self.until = content, fault, until
        self.nonce = os.urandom(8).hex()


class Holder:
    """What an engine holds for others, and the server where they get it."""

    def __init__(self, block, timeout):
        self._block, self._timeout = block, timeout
        self._lock, self._held, self._server = threading.Lock(), {}, None

    def hold(self, context, rank, prompt, fault):
        """Keeps a prompt's KV and returns the ticket for it."""
        blocks, total = [], 0
        for i in range(0, len(prompt), self._block):
            tokens = prompt[i:i + self._block]
            total += sum(tokens)
            blocks.append({"tokens": tokens, "sum": total})
        content = json.dumps(blocks).encode()
        held = Held(context, rank, content, len(blocks), fault, time.monotonic() + self._timeout)
        with self._lock:
            if self._server is None:
                self._server = _serve(self)
            if context in self._held:
                raise TransferError(f"context {context} is held already")
            self._held[context] = held
        log("held", context=context, rank=rank, blocks=held.blocks)
        host, port = self._server.server_address
        return json.dumps({"address": f"{host}:{port}", "context": context, "nonce": held.nonce,
                           "bytes": len(content), "checksum": zlib.crc32(content)}).encode()

    def find(self, context, nonce):
        self._expire()
        with self._lock:
            held = self._held.get(context)
        return held if held and held.nonce == nonce else None

    def release(self, held, reason):
        with self._lock:
            if self._held.get(held.context) is not held:
                return
            del self._held[held.context]
        log("released", context=held.context, rank=held.rank, reason=reason)

    def on(self, rank):
        """How many contexts a rank holds."""
        self._expire()
        with self._lock:
            return sum(1 for h in self._held.values() if h.rank == rank)

    def _expire(self):
        with self._lock:
            late = [h for h in self._held.values() if h.until <= time.monotonic()]
        for held in late:
            self.release(held, "expired")

    def close(self):
        if self._server:
            self._server.shutdown()
            self._server.server_close()


def _serve(holder):
    class Connection(socketserver.StreamRequestHandler):
        def handle(self):
            try:
                self._handle()
            except (OSError, ValueError, KeyError, TypeError):
                pass        # the receiver sees the end, and the KV stays

        def _handle(self):
            asked = json.loads(self.rfile.readline(4096))
            held = holder.find(asked["context"], asked["nonce"])
            if held is None:
                return self._say(error=f"context {asked['context']} is not here")
            content = held.content
            if held.fault == SILENT:
                return self.rfile.read(1)
            if held.fault == CORRUPT:
                content = bytes([content[0] ^ 1]) + content[1:]
            if held.fault == LOST:
                content = content[:len(content) // 2]
            self._say(context=held.context, bytes=len(held.content))
            self.wfile.write(content)
            if held.fault != LOST and json.loads(self.rfile.readline(4096)).get("taken"):
                holder.release(held, "taken")
            return None

        def _say(self, **answer):
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, block_on_close = True, False

    server = Server(("127.0.0.1", 0), Connection)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


async def fetch(state, context, prompt, timeout):
    """The sum of a prompt, from the engine that a hand-off names."""
    try:
        return await asyncio.wait_for(_fetch(state, context, prompt), timeout)
    except asyncio.TimeoutError as e:
        raise TransferError(f"context {context}: not complete within {timeout} s") from e
    except (OSError, ValueError, KeyError, TypeError, EOFError) as e:
        raise TransferError(f"context {context}: {type(e).__name__}: {e}") from e


async def _fetch(state, context, prompt):
    ticket = json.loads(state)
    if ticket["context"] != context:
        raise TransferError(f"the request is about context {context}, "
                            f"its opaque state about context {ticket['context']}")
    host, port = ticket["address"].rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(json.dumps({"context": context, "nonce": ticket["nonce"]}).encode() + b"\n")
        answer = json.loads(await reader.readline())
        if "error" in answer:
            raise TransferError(f"the sender says: {answer['error']}")
        size = ticket["bytes"]
        content = await reader.readexactly(size // 2)
        await asyncio.sleep(TRANSFER_DELAY)
        content += await reader.readexactly(size - size // 2)
        if answer["context"] != context or zlib.crc32(content) != ticket["checksum"]:
            raise TransferError(f"context {context}: the bytes are not those that were announced")
        blocks = json.loads(content)
        if [t for b in blocks for t in b["tokens"]] != prompt:
            raise TransferError(f"context {context}: the KV is that of another prompt")
        writer.write(b'{"taken": true}\n')
        await writer.drain()
        return blocks[-1]["sum"]
    finally:
        writer.close()
