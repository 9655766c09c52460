"""How much of a token's cost in the engine's process is the engine's own Python, and how much is the bridge's.

    python3 bench/peers/bridge_share.py [--streams 64] [--tokens 300] [--rounds 5] [--stepped]

Runs the stand-in engine twice a round, in processes of their own that take turns: bare, where somebody only iterates over its results, and bridged, where the bridge turns them into records and sends them to a
process that reads. The clock is the CPU time of the process, the sends in it. With --stepped all requests advance in the same turn of the event loop, as with an engine that works in batches; without it each has a timer
of its own. Only the pairs of one round can be compared on a shared machine.
"""
import argparse
import asyncio
import json
import os
import pathlib
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time

TOP = pathlib.Path(__file__).resolve().parents[2] / "pkg" / "engine" / "bridge"
PROMPT = struct.pack("<32i", *range(5, 37))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=10)
    parser.add_argument("--stepped", action="store_true")
    parser.add_argument("--one", choices=("bare", "bridged"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(measure(args))
        sys.stdout.flush()
        os._exit(0)  # the bridge's threads wait for a worker
    env = {**os.environ, "STANDIN_DELAY_MS": str(args.delay_ms), "STANDIN_LOG": "",
           "STANDIN_STEPPED": "1" if args.stepped else "", "PYTHONDONTWRITEBYTECODE": "1",
           "PYTHONPATH": os.pathsep.join((str(TOP / "testdata" / "standin"), str(TOP / "python")))}
    rows = []
    for _ in range(args.rounds):
        rows.append([float(subprocess.run([sys.executable, *sys.argv, "--one", way], env=env, check=True,
                                          stdout=subprocess.PIPE).stdout) for way in ("bare", "bridged")])
        print("bare %.1f, bridged %.1f us CPU/token" % tuple(rows[-1]))
    bare, bridged = (statistics.median(column) for column in zip(*rows))
    ours = statistics.median(b - a for a, b in rows)
    print(f"median: engine {bare:.1f}, with the bridge {bridged:.1f}, the bridge's share of a pair {ours:.1f} us CPU/token")


def measure(args):
    """CPU microseconds per token."""
    import tensorrt_llm
    from dynworker_bridge.engine import Engine
    order = {"streaming": True, "sampling": {"max_tokens": args.tokens, "ignore_eos": True}}
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    with tempfile.TemporaryDirectory() as model:
        with open(os.path.join(model, "config.json"), "w", encoding="utf-8") as f:
            json.dump({"vocab_size": 32000, "eos_token_id": 2}, f)
        engine = Engine(tensorrt_llm.LLM(model=model), "")
    run = {"bare": bare, "bridged": bridged}[args.one](loop, engine, order, args.streams)
    before = time.process_time()
    tokens = loop.run_until_complete(run)
    spent = time.process_time() - before
    if tokens != args.streams * args.tokens:
        sys.exit(f"{tokens} tokens came")
    return spent / tokens * 1e6


async def bare(_, engine, order, streams):
    async def one():
        async for result in engine.submit(PROMPT, order):
            count = len(result.outputs[0].token_ids)
        return count
    return sum(await asyncio.gather(*(one() for _ in range(streams))))


def bridged(loop, engine, order, streams):
    from dynworker_bridge import channel, ending, serve
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        while theirs.recv(1 << 20):
            pass
        os._exit(0)
    theirs.close()
    line = channel.Channel(ours.detach())
    server = serve.Server(line, loop, ending.Ending(line))
    server.engine = engine
    text = json.dumps(order).encode()

    async def all_of_them():
        for ident in range(streams):
            server._generate(struct.pack("<QI", ident, len(PROMPT) // 4) + PROMPT + text)
        results = [request._result for request in server._requests.values()]
        await asyncio.gather(*(request._task for request in server._requests.values()))
        return sum(len(result.outputs[0].token_ids) for result in results)
    return all_of_them()


if __name__ == "__main__":
    main()
