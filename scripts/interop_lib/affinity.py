"""Conversations and ranks, from an HTTP header to the call of the engine.

The engine is the daemon's Python bridge on the stand-in for tensorrt_llm, with
four attention-DP ranks. What the stand-in writes into its log is what the real
engine would have been called with.
"""

import itertools
import json
import string
import sys
import time
from pathlib import Path

from . import model
from .environment import clean
from .lane import Lane
from .procs import wait_for
from .report import expect
from .serving import CHAT, COMPLETIONS, chat, check_usage, completion

STANDIN = Path(__file__).resolve().parents[2] / "pkg/engine/bridge/testdata/standin"
RANKS = 4
POLICY = {"kv_cache_routing_conversation_affinity": True}
NO_SIMULATOR = {f"engine__sim__{k}": None for k in (
    "vocab_size", "first_token_id", "eos_token_id", "eos_every", "max_seq_len", "calls_log")}


def bridge_settings(folder, name, build, args, delay, *more_env):
    """The log of the stand-in's calls, and the settings of a worker that runs it with these engine arguments."""
    extra = folder / f"{name}.yaml"
    extra.write_text(json.dumps(args))
    log = folder / f"{name}.jsonl"
    env = [f"PYTHONPATH={STANDIN}", "PYTHONDONTWRITEBYTECODE=1", f"STANDIN_API={build}",
           f"STANDIN_LOG={log}", f"STANDIN_DELAY_MS={delay}", *more_env]
    return log, {**NO_SIMULATOR, "engine__kind": "trtllm", "engine__command": f"[{sys.executable}, -B]",
                 "engine__env": "[" + ", ".join(env) + "]", "engine__trtllm__extra_engine_args": extra}


def engine_text(ids, count, choice=0):
    """What the stand-in answers (golden/README.md): token k is sum of the prompt + 7k + 13 a choice."""
    tokens = [(sum(ids) + 7 * k + 13 * choice) % model.VOCABULARY for k in range(count)]
    return "".join(model.CHARACTERS[t - len(model.SPECIAL)] for t in tokens).replace("\u0120", " ")


def prompt_ids(text):
    return [len(model.SPECIAL) + model.CHARACTERS.index("\u0120" if c == " " else c) for c in text]


def chat_ids(text):
    return [model.SPECIAL.index("<|user|>"), *prompt_ids(text), model.SPECIAL.index("<|assistant|>")]


def readable(ids_of, first="A"):
    """A prompt whose first generated character is first, so that 8 tokens of 2 choices are printable ASCII."""
    wanted = prompt_ids(first)[0]
    for letters in itertools.product(string.ascii_lowercase, repeat=6):
        text = "say " + "".join(letters)
        if sum(ids_of(text)) % model.VOCABULARY == wanted:
            return text
    raise AssertionError("no such prompt")


class Affinity(Lane):
    name = "affinity"

    def __init__(self, setup, plane, reference):
        super().__init__(setup, plane, reference)
        # The router and the start do not know which plane carries the requests.
        if plane == "nats":
            self.checks = [*self.checks, *self.once]

    def setup(self):
        self._serve(policy=True)

    def _settings(self, name, build, policy, delay=0):
        args = {"tensor_parallel_size": RANKS, "enable_attention_dp": True, "max_seq_len": 8192}
        if policy:
            args["attention_dp_config"] = POLICY
        return bridge_settings(self.stack.folder, name, build, args, delay)

    def _serve(self, policy, frontend=(), **settings):
        """Puts one worker and one frontend in the place of those that serve."""
        for old in self.stack.workers:
            old.process.stop(30)
        for old in self.stack.frontends:
            old.process.kill()
        self.log, base = self._settings(f"engine-{len(self.stack.workers)}", "rc29", policy, delay=2)
        self.worker = self.stack.worker(**base, **settings)
        self.api = self.stack.frontend(*frontend).api
        wait_for("an answer", 30, lambda: self.api.post(COMPLETIONS, completion("ready", 1)).status == 200)

    def _events(self, kind):
        lines = self.log.read_text().split("\n")[:-1]
        return [e for e in map(json.loads, lines) if e["event"] == kind]

    def _ask(self, headers=None, text="hello fox"):
        """One request; returns (conversation argument or "absent", rank argument, serving rank)."""
        before = len(self._events("generate_async"))
        answer = self.api.post(CHAT, chat(text, 2), headers)
        expect(answer.status == 200, f"{headers}: {answer}")
        calls, placed = self._events("generate_async"), self._events("placed")
        expect(len(calls) == before + 1, f"{len(calls) - before} calls of the engine for one request")
        call = calls[-1]
        conversation = call.get("conversation_params", "absent")
        if isinstance(conversation, dict):
            conversation = conversation.get("conversation_id")
        scheduling = call.get("scheduling_params")
        rank = None
        if scheduling:
            expect(scheduling.get("attention_dp_relax") is False, f"the rank is not strict: {scheduling}")
            rank = scheduling.get("attention_dp_rank")
        return conversation, rank, placed[-1]["rank"]

    def turns(self):
        homes = {}
        for turn in range(2):
            for n in range(8):
                name = f"conversation {n}"
                conversation, rank, serving = self._ask({"x-dynamo-session-id": name}, f"turn {turn} of {n}")
                expect((conversation, rank) == (name, None), f"{name}: the engine saw id {conversation!r}, rank {rank}")
                expect(homes.setdefault(name, serving) == serving,
                       f"{name}: turn {turn} on rank {serving}, the first on {homes[name]}")
        expect(len(set(homes.values())) == RANKS, f"8 conversations only on ranks {sorted(set(homes.values()))}")
        return f"8 conversations of 2 turns: same id, no rank, same serving rank; first turns on {list(homes.values())}"

    def no_header(self):
        for headers in (None, {"x-dynamo-session-id": "  "}, {"x-dynamo-parent-session-id": "p"}):
            seen = self._ask(headers)
            expect(seen[:2] == (None, None), f"{headers}: the engine saw id {seen[0]!r}, rank {seen[1]}")
        return "none, a blank one and only a parent's: an explicit none, no rank"

    def agents(self):
        cases = [
            ({"x-claude-code-session-id": "s3"}, "s3"),
            ({"x-claude-code-session-id": "s3", "x-claude-code-agent-id": "a3"}, "a3"),
            ({"thread-id": "s4"}, "s4"), ({"x-session-id": "s5"}, "s5"),
            ({"x-dynamo-session-id": " s6 ", "x-session-id": "s5"}, "s6"),
        ]
        for headers, wanted in cases:
            seen = self._ask(headers)
            expect(seen[:2] == (wanted, None), f"{headers}: the engine saw id {seen[0]!r}, rank {seen[1]}")
        return "Claude Code's session and agent, Codex's thread, OpenCode's session; Dynamo's own wins, trimmed"

    def texts(self):
        text = readable(chat_ids)
        wanted = engine_text(chat_ids(text), 5)
        answer = self.api.post(CHAT, chat(text, 5))
        expect(answer.status == 200, str(answer))
        got = answer.body["choices"][0]["message"]["content"]
        expect(got == wanted, f"{got!r} instead of {wanted!r}")
        usage = check_usage(answer.body["usage"], len(text) + 2, 5)
        stream = self.api.stream(CHAT, chat(text, 5, stream_options={"include_usage": True})).collect()
        expect(stream.whole() is None, stream.whole())
        expect((stream.text, stream.finish) == (wanted, "length"), f"streamed: {stream.text!r}, {stream.finish}")
        check_usage(stream.usage, len(text) + 2, 5)
        return f"{wanted!r} whole and streamed, {usage}"

    def choices(self):
        text = readable(prompt_ids)
        ids = prompt_ids(text)
        answer = self.api.post(COMPLETIONS, completion(text, 4, n=2, temperature=0.5))
        expect(answer.status == 200, str(answer))
        got = {c["index"]: c["text"] for c in answer.body["choices"]}
        wanted = {i: engine_text(ids, 4, i) for i in (0, 1)}
        expect(got == wanted, f"{got} instead of {wanted}")
        check_usage(answer.body["usage"], len(ids), 8)
        return f"n=2: {got}, usage counts both"

    def logprobs(self):
        text = readable(chat_ids)
        answer = self.api.post(CHAT, chat(text, 4, logprobs=True, top_logprobs=2))
        expect(answer.status == 200, str(answer))
        content = answer.body["choices"][0]["logprobs"]["content"]
        got = [(c["token"], c["logprob"], [t["logprob"] for t in c["top_logprobs"]]) for c in content]
        tops = [-0.25, -0.5, -0.75, -0.25]
        wanted = [(c, top, [top, top - 1]) for c, top in zip(engine_text(chat_ids(text), 4), tops)]
        expect(got == wanted, f"{got} instead of {wanted}")
        return f"chosen {tops}, with two alternatives each"

    def stop_string(self):
        text = readable(prompt_ids)
        full = engine_text(prompt_ids(text), 8)
        answer = self.api.post(COMPLETIONS, completion(text, 8, stop=[full[3:5]]))
        expect(answer.status == 200, str(answer))
        choice = answer.body["choices"][0]
        expect((choice["text"], choice["finish_reason"]) == (full[:3], "stop"), f"{choice} instead of {full[:3]!r}, stop")
        return f"{full!r} ends before {full[3:5]!r}"

    def refused(self):
        before = len(self._events("generate_async"))
        answer = self.api.post(COMPLETIONS, completion("x", 4, n=2))
        words = str(answer.body.get("message")) if isinstance(answer.body, dict) else ""
        expect(answer.status == 400 and "greedy" in words, f"wanted 400 with the worker's words, got {answer}")
        expect(len(self._events("generate_async")) == before, "it reached the engine")
        return f"400 {words!r}"

    def engine_error(self):
        answer = self.api.post(CHAT, chat("hello fox", 8, nvext={"cache_salt": "trigger:90001"}))
        expect(answer.status == 500 and "Internal server error" in answer.text, f"wanted 500 as recorded, got {answer}")
        after = self.api.post(CHAT, chat("hello fox", 2))
        expect(after.status == 200, f"the next request: {after}")
        return f"{answer}; the next request is served"

    def hang_up(self):
        before = len(self._events("abort"))
        stream = self.api.stream(COMPLETIONS, completion("nobody listens", 4000, ignore_eos=True))
        for _ in range(5):
            expect(stream.next() is not None, f"the stream ended early: {stream.whole()}")
        left = stream.hang_up()
        wait_for("an abort in the engine", 10, lambda: len(self._events("abort")) > before, pause=0.01)
        took = time.monotonic() - left
        time.sleep(1)  # the time in which a second abort would show
        aborts = self._events("abort")[before:]
        expect(len(aborts) == 1, f"{len(aborts)} aborts")
        return f"one abort after {took * 1000:.0f} ms and {aborts[0]['tokens']} of 4000 tokens"

    def _router_ranks(self, wanted):
        """Asks the KV router, freely and pinned to each rank; wanted(id) is the conversation argument."""
        seen = []
        for pinned in (None, *range(RANKS)):
            for name in ("k1", None):
                headers = {"x-dynamo-session-id": f"{name} {pinned}"} if name else {}
                if pinned is not None:
                    headers |= {"x-dynamo-worker-instance-id": str(self.worker.instance_id), "x-dynamo-dp-rank": str(pinned)}
                conversation, rank, serving = self._ask(headers)
                id_wanted, rank_passed = wanted(headers.get("x-dynamo-session-id"))
                expect(conversation == id_wanted, f"{headers}: conversation {conversation!r} instead of {id_wanted!r}")
                if not rank_passed:
                    expect(rank is None, f"{headers}: rank {rank} forced")
                    continue
                expect(rank in range(RANKS) and rank == serving, f"{headers}: rank {rank} asked for, served by {serving}")
                expect(pinned in (None, rank), f"{headers}: rank {rank}")
                seen.append(rank)
        return seen

    def router_off(self):
        self._serve(False, ("--router-mode", "kv"))
        seen = self._router_ranks(lambda name: ("absent", True))
        return f"the router's rank, strict ({seen}), and no conversation argument, with and without the header"

    def router_dynamo(self):
        self._serve(True, ("--router-mode", "kv"), affinity__rank_source="dynamo")
        seen = self._router_ranks(lambda name: (name, name is not None))
        return f"id and the router's rank, strict ({seen}); without an id an explicit none and no rank"

    def start_failures(self):
        seen = []
        lacking = ("ConversationParams", "newer than 1.3.0rc20")
        by_override = {"affinity__override": "true"}
        # An override that the engine contradicts counts only where the configuration lets it.
        cases = (
            ("hybrid", "engine file", True, {}, ("build 1.3.0rc20", *lacking)),
            ("rc19", "override", False, {**by_override, "affinity__on_disagreement": "warn"}, ("build 1.3.0rc19", *lacking)),
            ("rc21", "override against the engine", False, by_override,
             ("affinity.override", "kv_cache_routing_conversation_affinity")),
        )
        for build, by, policy, extra, message in cases:
            _, keys = self._settings(f"fails-{build}", build, policy)
            keys |= {"etcd__endpoints": self.stack.etcd.url, "nats__server": self.stack.nats.url,
                     "namespace": f"fails-{build}", "model__path": self.shared.model, "model__name": "tiny", **extra}
            words = [w for k, v in keys.items() if v is not None for w in ("--set", f"{k.replace('__', '.')}={v}")]
            watch = self.stack.etcd.watch("v1/")
            process = self.shared.processes.start([self.shared.binary, "serve", *words],
                                                  self.stack.folder / f"fails-{build}.log", env=clean(), cwd=self.stack.folder)
            code = process.wait(40)
            watch.close()
            ours = [e for e in watch.events if f"fails-{build}" in e[2]]
            log = process.tail(40)
            expect(code == 1, f"{build}: exit code {code}: {log}")
            last = process.tail(1)
            for word in message:
                expect(word in last, f"{build}: {word!r} is not in the message: {log}")
            expect(not ours and not self.stack.etcd.list(f"v1/instances/fails-{build}"), f"{build}: keys appeared: {ours}")
            seen.append(f"{build} by {by}")
        return "; ".join(seen) + ": exit code 1, the message names what is needed, no key in etcd at any time"

    checks = [
        ("conversation keeps its rank", turns),
        ("no conversation", no_header),
        ("headers of agents", agents),
        ("bridge: texts and usage", texts),
        ("bridge: two choices", choices),
        ("bridge: logprobs", logprobs),
        ("bridge: stop string", stop_string),
        ("bridge: refusal", refused),
        ("bridge: engine request error", engine_error),
        ("bridge: client hangs up", hang_up),
    ]
    once = [
        ("KV router, policy off", router_off),
        ("KV router, policy on, source dynamo", router_dynamo),
        ("policy that cannot be", start_failures),
    ]
