"""Prefill and decode in workers of their own, as the frontend runs them.

The engines are simulated ones: decode has no text but from the KV that it
receives from the prefill engine's process, so whatever is lost, mixed up or
left behind between the two shows. One check has the Python bridge with the
stand-in for tensorrt_llm on both sides.
"""

import json
import random
import threading
import time

from . import model
from .affinity import bridge_settings, engine_text, prompt_ids, readable
from .lane import Lane
from .load import Traffic, compare
from .procs import wait_for
from .report import CheckFailed, expect
from .serving import CHAT, COMPLETIONS, completion

RANKS = 4
MIGRATIONS = ("--migration-limit", "5")
# What a transfer takes, and how long KV is held that nobody comes for.
TRANSFER, HELD = "60ms", "4s"
LOST = 25   # one transfer in so many ends half-way
MASK = (1 << 64) - 1


def next_token(ids, eos_every=500):
    """The simulated engine's first token after a prompt (docs/engine-protocol.md, "Text")."""
    h = 0x243F6A8885A308D3
    for t in ids:
        h = ((h ^ t) * 0x9E3779B97F4A7C15) & MASK
        h ^= h >> 32
    x = ((h ^ (h >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & MASK
    x ^= x >> 33
    if (x >> 32) % eos_every == 0:
        return model.EOS
    return len(model.SPECIAL) + x % (model.PRINTABLE - len(model.SPECIAL))


class Mixed(threading.Thread):
    """A client of the mixed load: whole texts, short ones, and streams that it leaves at some moment."""

    def __init__(self, lane, number, requests):
        super().__init__(daemon=True)
        self._lane, self._requests, self._random = lane, requests, random.Random(number)
        self.name = f"mixed {number}"
        self.whole, self.left, self.broken = 0, 0, []
        self.start()

    def run(self):
        for i in range(self._requests):
            prompt = f"{self.name}, {i % 20}: "
            tokens = self._random.choice((1, 2, 8, 30))
            try:
                self._one(prompt, tokens, self._random.random() < 0.3)
            except (OSError, CheckFailed) as err:
                self.broken.append(f"{prompt!r}: {err!r}")

    def _one(self, prompt, tokens, leaves):
        stream = self._lane.api.stream(COMPLETIONS, completion(prompt, tokens, ignore_eos=True))
        if leaves:
            time.sleep(self._random.random() * 0.15)   # anywhere between prefill and the last token
            stream.hang_up()
            self.left += 1
            return
        stream.collect()
        expect(stream.whole() is None, stream.whole())
        compare(stream.text, self._lane.reference.text(prompt, tokens))
        self.whole += 1


class Disagg(Lane):
    name = "disagg"

    def __init__(self, setup, plane, reference):
        super().__init__(setup, plane, reference)
        # What is behind the request plane does not know which one it is.
        if plane == "nats":
            self.checks = [*self.checks, *self.once]

    def setup(self):
        self.prefill = [self._worker("prefill") for _ in range(2)]
        self.decode = [self._worker("decode") for _ in range(2)]
        self.api = self._frontend(*MIGRATIONS)

    def _worker(self, role, **settings):
        return self.stack.worker(**{
            "role": role, "engine__sim__attention_dp_size": RANKS, "engine__sim__conversation_affinity": "true",
            "engine__sim__kv_transfer_timeout": HELD, **settings})

    def _frontend(self, *extra):
        """A frontend that has all four workers."""
        api = self.stack.frontend(*extra).api
        wait_for("the model to be listed", 30, lambda: "tiny" in (api.models() or []))
        workers = self.prefill + self.decode
        before = [len(w.calls()) for w in workers]

        def each_answered():
            answer = api.post(COMPLETIONS, completion(f"ready? {time.monotonic()}", 2))
            return answer.status == 200 and all(len(w.calls()) > n for w, n in zip(workers, before))
        wait_for("answers from two prefill and two decode workers", 40, each_answered)
        return api

    # Texts

    def _texts(self, api):
        """Answers of the pair, whole and streamed, against those of an aggregated worker."""
        before = [len(w.calls()) for w in self.decode]
        count = 0
        for i in range(8):
            prompt = f"phase {i} " * (1 + 7 * i)
            for fields in ({"ignore_eos": True}, {"seed": 40 + i}, {"logprobs": 2, "ignore_eos": True}):
                tokens = (1, 2, 12, 60)[i % 4]
                wanted = self.reference.answer(prompt, tokens, **fields)
                answer = api.post(COMPLETIONS, completion(prompt, tokens, **fields))
                expect(answer.status == 200, f"{fields}: {answer}")
                got, want = answer.body["choices"][0], wanted["choices"][0]
                expect(got == want, f"{fields}, {tokens} tokens: {json.dumps(got)[:400]} instead of {json.dumps(want)[:400]}")
                usage = {k: answer.body["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")}
                expect(all(wanted["usage"][k] == v for k, v in usage.items()), f"usage {usage}, wanted {wanted['usage']}")
                stream = api.stream(COMPLETIONS, completion(prompt, tokens, **fields)).collect()
                expect(stream.whole() is None, stream.whole())
                compare(stream.text, want["text"])
                expect(stream.finish == want["finish_reason"], f"streamed: finish {stream.finish}")
                count += 2
        shares = [len(w.calls()) - n for w, n in zip(self.decode, before)]
        expect(sum(shares) == count and min(shares) > 0, f"{count} requests, decode workers had {shares}")
        return f"{count} answers, whole, streamed, seeded, with logprobs and usage, equal to one worker's; decode had {shares}"

    def texts(self):
        return self._texts(self.api)

    def ends_at_once(self):
        prompt = next(p for p in (f"an end, take {i}" for i in range(100000)) if next_token(prompt_ids(p)) == model.EOS)
        before = [len(w.calls()) for w in self.prefill + self.decode]
        wanted = self.reference.answer(prompt, 20)
        answer = self.api.post(COMPLETIONS, completion(prompt, 20))
        expect(answer.status == 200, str(answer))
        expect(answer.body["choices"] == wanted["choices"], f"{answer.body['choices']} instead of {wanted['choices']}")
        more = [len(w.calls()) - n for w, n in zip(self.prefill + self.decode, before)]
        expect(sum(more[:2]) == 1 and sum(more[2:]) == 0, f"calls of the engines: {more}")
        return f"finish {answer.body['choices'][0]['finish_reason']}, no decode worker was asked"

    # Ranks

    def _ranks(self, worker, since):
        """(conversation, rank) of what the engine placed after so many events."""
        events = worker.events()[since:]
        asked = {e["id"]: (e.get("params") or {}).get("conversation") for e in events if e["event"] == "generate"}
        return [((asked[e["id"]] or {}).get("id"), e["rank"]) for e in events if e["event"] == "placed" and e["id"] in asked]

    def _turns(self, api):
        workers = self.prefill + self.decode
        since = [len(w.events()) for w in workers]
        conversations = [f"talk {i} {time.monotonic()}" for i in range(6)]
        for turn in range(5):
            for name in conversations:
                answer = api.post(CHAT, {"model": "tiny", "max_tokens": 4, "ignore_eos": True, "messages": [
                    {"role": "user", "content": f"{name}, turn {t}"} for t in range(turn + 1)]}, {"x-dynamo-session-id": name})
                expect(answer.status == 200, str(answer))
        seen = []
        for role, pair in (("prefill", (0, 1)), ("decode", (2, 3))):
            homes, turns = {}, 0
            for w in pair:
                for name, rank in self._ranks(workers[w], since[w]):
                    expect(name in conversations, f"{role}: the engine was given the conversation {name!r}")
                    expect(homes.setdefault((w, name), rank) == rank,
                           f"{role} worker {w}: {name} on rank {rank}, before on {homes[w, name]}")
                    turns += 1
            expect(turns == 5 * len(conversations), f"{role}: {turns} turns of {5 * len(conversations)}")
            seen.append(f"{role} {sorted(homes.values())}")
        return f"6 conversations of 5 turns: one rank on each worker that had one, in both phases: {', '.join(seen)}"

    def turns(self):
        return self._turns(self.api)

    def kv_router(self):
        api = self._frontend("--router-mode", "kv", *MIGRATIONS)
        return f"{self._texts(api)}; {self._turns(api)}"

    def bypass(self):
        # The router leaves prefill out where decode has a part of the prompt already. It would know from KV events;
        # what it predicts from its own decisions does as well.
        config = {"policy": "isl_bounding", "eff_isl_threshold": 4096, "eff_isl_ratio_threshold": 1.0}
        api = self.stack.frontend("--router-mode", "kv", "--router-predicted-ttl-secs", "60", "--router-conditional-disagg",
                                  "--router-conditional-disagg-config", json.dumps(config), *MIGRATIONS).api
        wait_for("an answer", 30, lambda: api.post(COMPLETIONS, completion("ready", 1)).status == 200)
        before, since = [len(w.calls()) for w in self.prefill], [len(w.events()) for w in self.decode]
        for i in range(10):
            prompt = f"{'the same long beginning ' * 15}{i}"
            answer = api.post(COMPLETIONS, completion(prompt, 20, ignore_eos=True))
            expect(answer.status == 200, str(answer))
            compare(answer.body["choices"][0]["text"], self.reference.text(prompt, 20))
        asked = [e["params"].get("disaggregated") for w, n in zip(self.decode, since)
                 for e in w.events()[n:] if e["event"] == "generate"]
        local = [a for a in asked if (a or {}).get("request_type") == "context_and_generation"]
        prefills = sum(len(w.calls()) - n for w, n in zip(self.prefill, before))
        expect(local and len(local) == 10 - prefills, f"of 10 requests {prefills} were prefilled, decode was asked {asked}")
        return f"the frontend left out the prefill worker for {len(local)} of 10 requests; texts equal"

    # Losses

    def _slow(self):
        """Takes workers in the place of the others that spend some time in each phase."""
        self._end_all()
        self.prefill = [self._slow_worker("prefill") for _ in range(2)]
        self.decode = [self._slow_worker("decode") for _ in range(2)]
        self.api = self._frontend(*MIGRATIONS)

    def _end_all(self):
        for worker in self.stack.workers:
            worker.process.stop(30)
        for frontend in self.stack.frontends:
            frontend.process.kill()

    def _slow_worker(self, role):
        return self._worker(role, engine__sim__first_token_delay="40ms", engine__sim__kv_transfer_delay=TRANSFER,
                            engine__sim__token_delay="4ms", engine__sim__stats_interval="50ms",
                            engine__sim__kv_transfer_lose_every=LOST, etcd__lease_ttl="5s")

    @staticmethod
    def _phases(worker):
        """Requests that a worker's engine is in the middle of, by phase."""
        asked, here, over, held, released = set(), set(), set(), set(), set()
        for e in worker.events():
            into = {"generate": asked, "received": here, "finish": over}.get(e["event"])
            if into is not None:
                into.add(e["id"])
            if e["event"] in ("held", "released"):
                {"held": held, "released": released}[e["event"]].add(e["context"])
        return {"prefill": asked - over, "held": held - released, "transfer": asked - here - over, "decode": here - over}

    def _leaves(self, role, phases, end):
        """Ends a worker under load, at a moment at which it has requests in each of the phases."""
        self._settled()
        pair = getattr(self, role)
        leaves = pair[0]
        traffic = Traffic(self.api, f"{role} leaves {time.monotonic()}", 12, 100)

        def in_each():
            found = self._phases(leaves)
            return found if all(found[p] for p in phases) else None
        seen = wait_for(f"requests in the phases {phases}", 30, in_each, pause=0.005)
        code = end(leaves)
        time.sleep(2)   # in which the others do its work
        total = traffic.stop()
        traffic.compare(self.reference)
        pair[0] = self._slow_worker(role)
        return leaves, code, f"{total} texts equal; the worker had " + ", ".join(f"{len(seen[p])} in {p}" for p in phases)

    def _killed(self, role, phases):
        return self._leaves(role, phases, lambda worker: worker.process.kill())[2]

    def _terminated(self, role, phases):
        def end(worker):
            worker.terminate()
            return worker.process.wait(40)
        worker, code, seen = self._leaves(role, phases, end)
        expect(code == 0, f"{seen}; it ended with exit code {code}")
        cut = [e for e in worker.events() if e["event"] == "finish" and e.get("reason") == "cancelled"]
        expect(not cut, f"{seen}; {len(cut)} requests were cut off")
        left = self._phases(worker)["held"]
        expect(not left, f"{seen}; it left with {len(left)} contexts that nobody had fetched")
        return seen

    def prefill_killed(self):
        return self._killed("prefill", ("prefill", "held"))

    def decode_killed(self):
        return self._killed("decode", ("transfer", "decode"))

    def prefill_terminated(self):
        self._slow()
        return f"{self._terminated('prefill', ('prefill', 'held'))}; all its KV was fetched before it ended"

    def decode_terminated(self):
        return self._terminated("decode", ("transfer", "decode"))

    def nothing_held(self):
        self._settled()
        clients = [Mixed(self, i, 63) for i in range(16)]

        def done(share):
            return sum(c.whole + c.left + len(c.broken) for c in clients) >= share * 16 * 63
        for share, pair in ((0.3, self.prefill), (0.6, self.decode)):
            wait_for("the mixed load", 60, lambda: done(share))
            pair.pop(0).process.kill()
        for client in clients:
            client.join(120)
            expect(not client.is_alive(), "a client waits for ever")
        broken = [b for c in clients for b in c.broken]
        whole, left = sum(c.whole for c in clients), sum(c.left for c in clients)
        expect(not broken, f"{len(broken)} of {whole + left + len(broken)} requests broke, first {broken[:1]}")
        dangling = [i for w in self.decode for i in self._dangling(w)]
        expect(not dangling, f"{len(dangling)} of {left} cancels came to decode before the KV was there")
        most = self._held()
        wait_for("all KV to be free", 15, lambda: self._held() == 0)
        expired = sum(e["event"] == "released" and e.get("reason") == "expired" for w in self.prefill for e in w.events())
        return (f"{whole} texts equal, {left} left by their client, none before its KV was there, a prefill and a decode "
                f"worker killed, one transfer in {LOST} lost; KV held afterwards {most:.0f} requests, then 0, {expired} of all by time")

    @staticmethod
    def _dangling(worker):
        """Requests that were cancelled before their KV was there, so that the other side keeps it."""
        waiting, found = set(), []
        for e in worker.events():
            if e["event"] == "generate" and (e["params"].get("disaggregated") or {}).get("request_type") == "generation_only":
                waiting.add(e["id"])
            elif e["event"] == "cancel" and e["id"] in waiting:
                found.append(e["id"])
            elif e["event"] in ("received", "finish"):
                waiting.discard(e["id"])
        return found

    def _held(self):
        return sum(w.metric("dynworker_engine_held_requests") for w in self.prefill + self.decode)

    def _settled(self):
        """Waits until the workers of now, and no others, answer."""
        workers = self.prefill + self.decode
        before = [len(w.calls()) for w in workers]

        def each_answered():
            self.api.post(COMPLETIONS, completion(f"there? {time.monotonic()}", 2))
            return all(len(w.calls()) > n for w, n in zip(workers, before))
        wait_for("answers from all four workers", 40, each_answered)

    # The bridge

    def bridge(self):
        self._end_all()
        args = {"tensor_parallel_size": RANKS, "enable_attention_dp": True, "max_seq_len": 8192,
                "attention_dp_config": {"kv_cache_routing_conversation_affinity": True}}
        logs = []
        for role in ("prefill", "decode"):
            log, settings = bridge_settings(self.stack.folder, f"bridge-{role}", "rc29", args, 2, "STANDIN_TRANSFER=1")
            logs.append(log)
            # The bridge cannot say what the engine holds; so the way out waits for as long as a transfer may take.
            self.stack.worker(role=role, disaggregation__transfer_timeout="2s", **settings)
        api = self.stack.frontend().api
        wait_for("an answer", 40, lambda: api.post(COMPLETIONS, completion("ready", 1)).status == 200)
        text = readable(prompt_ids)
        wanted = engine_text(prompt_ids(text), 6)
        answer = api.post(COMPLETIONS, completion(text, 6, logprobs=2))
        expect(answer.status == 200, str(answer))
        choice = answer.body["choices"][0]
        expect(choice["text"] == wanted, f"{choice['text']!r} instead of {wanted!r}")
        probs = choice["logprobs"]["token_logprobs"]
        expect(probs == [-0.25, -0.5, -0.75] * 2, f"log probabilities {probs}")
        stream = api.stream(COMPLETIONS, completion(text, 6)).collect()
        expect(stream.whole() is None, stream.whole())
        compare(stream.text, wanted)

        def contexts(event):
            lines = logs[0].read_text().split("\n")[:-1]
            return sorted(e["context"] for e in map(json.loads, lines) if e["event"] == event)
        held = contexts("held")
        expect(len(held) >= 2, f"{len(held)} contexts held")
        wait_for("all KV to be taken", 5, lambda: contexts("released") == held)
        return f"{wanted!r} with log probabilities, whole and streamed; {len(held)} contexts went from process to process"

    checks = [
        ("disagg: texts", texts),
        ("disagg: first token ends the text", ends_at_once),
    ]
    once = [
        ("disagg: conversation keeps its rank", turns),
        ("disagg: KV router", kv_router),
        ("disagg: prefill left out", bypass),
        ("disagg: bridge", bridge),
        ("disagg: SIGTERM of a prefill worker", prefill_terminated),
        ("disagg: SIGTERM of a decode worker", decode_terminated),
        ("disagg: prefill worker killed", prefill_killed),
        ("disagg: decode worker killed", decode_killed),
        ("disagg: 1000 mixed requests", nothing_held),
    ]
