"""What a client of the frontend must see when nothing is wrong, and when it is the client's fault."""

import re
import time

from . import model
from .lane import Lane
from .load import compare
from .procs import wait_for
from .report import CheckFailed, expect

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(text, tokens, **fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, **fields}


def completion(text, tokens, **fields):
    return {"model": "tiny", "prompt": text, "max_tokens": tokens, **fields}


def check_usage(usage, prompt, generated):
    seen = {k: (usage or {}).get(k) for k in ("prompt_tokens", "completion_tokens", "total_tokens")}
    wanted = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    expect(seen == wanted, f"usage {seen}, wanted {wanted}")
    return f"usage {prompt} + {generated} = {prompt + generated}"


class Serving(Lane):
    name = "serving"

    def setup(self):
        self.first = self._worker()
        self.api = self.stack.frontend().api
        self.stack.wait_served(self.api, [self.first])

    def _worker(self):
        return self.stack.worker(engine__sim__token_delay="5ms", affinity__out_of_range="reject")

    def no_common_disk(self):
        card = self.stack.etcd.get(self.first.card_key).value.decode()
        urls = re.findall(r'"(https?://[^"]+)"', card)
        names = sorted(u.rsplit("/", 1)[1] for u in urls)
        wanted = sorted(p.name for p in self.shared.model.iterdir() if p.suffix != ".safetensors")
        expect(names == wanted, f"the card names the files {names}, the folder has {wanted}")
        gets = self.first.files.counts()
        expect(gets == {n: 1 for n in wanted}, f"one GET for each of {wanted} expected, seen {gets}")
        return f"{len(wanted)} files, each fetched once by a frontend that cannot read the folder"

    def listed(self):
        names = self.api.models()
        expect(names == ["tiny"], f"models {names}")
        return f"/v1/models names {names}"

    def chat(self):
        text = "hello fox"
        answer = self.api.post(CHAT, chat(text, 24, ignore_eos=True))
        expect(answer.status == 200, str(answer))
        choice = answer.body["choices"][0]
        content = choice["message"]["content"]
        expect(choice["finish_reason"] == "length", f"finish {choice['finish_reason']}")
        expect(content and len(content) == 24, f"24 characters expected, got {content!r}")
        return f"24 tokens, finish length, {check_usage(answer.body['usage'], len(text) + 2, 24)}"

    def chat_streamed(self):
        text = "hello fox"
        whole = self.api.post(CHAT, chat(text, 24, ignore_eos=True)).body["choices"][0]["message"]["content"]
        stream = self.api.stream(CHAT, chat(
            text, 24, ignore_eos=True, stream_options={"include_usage": True})).collect()
        expect(stream.whole() is None, stream.whole())
        compare(stream.text, whole)
        expect(stream.finish == "length", f"finish {stream.finish}")
        return (f"same text in {len(stream.arrivals)} events, finish length, "
                f"{check_usage(stream.usage, len(text) + 2, 24)}")

    def completions(self):
        answer = self.api.post(COMPLETIONS, completion("once upon a time", 40, ignore_eos=True))
        expect(answer.status == 200, str(answer))
        choice = answer.body["choices"][0]
        compare(choice["text"], self.reference.text("once upon a time", 40))
        expect(choice["finish_reason"] == "length", f"finish {choice['finish_reason']}")
        return f"40 tokens, finish length, {check_usage(answer.body['usage'], 16, 40)}"

    def completions_streamed(self):
        stream = self.api.stream(COMPLETIONS, completion(
            "once upon a time", 40, ignore_eos=True, stream_options={"include_usage": True})).collect()
        expect(stream.whole() is None, stream.whole())
        compare(stream.text, self.reference.text("once upon a time", 40))
        expect(stream.finish == "length", f"finish {stream.finish}")
        return f"same text in {len(stream.arrivals)} events, finish length, {check_usage(stream.usage, 16, 40)}"

    def cached_usage(self):
        prompt = "the same long beginning, which the engine has in its cache when it comes again"
        cached = []
        for _ in range(2):
            answer = self.api.post(COMPLETIONS, completion(prompt, 4, ignore_eos=True))
            expect(answer.status == 200, str(answer))
            check_usage(answer.body["usage"], len(prompt), 4)
            cached.append((answer.body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens"))
        expect(cached[0] == 0 and cached[1] in (32, 64), f"cached_tokens {cached}")
        return f"cached_tokens {cached[0]} for the first, {cached[1]} of {len(prompt)} for the second request"

    def stop_string(self):
        prompt, tokens = "stop somewhere", 200
        full = self.reference.text(prompt, tokens)
        # The first place at which the string occurs, so that only stopping there is right.
        stop = full[60:63]
        at = full.index(stop)
        seen = []
        for streamed in (False, True):
            body = completion(prompt, tokens, stop=[stop])
            if streamed:
                s = self.api.stream(COMPLETIONS, body).collect()
                expect(s.whole() is None, s.whole())
                text, finish = s.text, s.finish
            else:
                answer = self.api.post(COMPLETIONS, body)
                expect(answer.status == 200, str(answer))
                text, finish = answer.body["choices"][0]["text"], answer.body["choices"][0]["finish_reason"]
            compare(text, full[:at])
            expect(finish == "stop", f"finish {finish}")
            seen.append(f"{len(text)} characters")
        call = self._newest_call(prompt)
        wait_for("the engine to be through with the stopped request", 5, lambda: self._newest_call(prompt).finish)
        call = self._newest_call(prompt)
        expect(call.tokens < tokens, f"the engine generated all {call.tokens} tokens although the text had stopped")
        return f"whole and streamed end before {stop!r} after {seen[0]}, finish stop; engine ended after {call.tokens} tokens"

    def eos(self):
        prompt, wanted = self._ends_by_itself()
        generated = wanted["usage"]["completion_tokens"]
        text = wanted["choices"][0]["text"]
        answer = self.api.post(COMPLETIONS, completion(prompt, 3000))
        expect(answer.status == 200, str(answer))
        choice = answer.body["choices"][0]
        compare(choice["text"], text)
        expect(choice["finish_reason"] == "stop", f"finish {choice['finish_reason']}")
        seen = check_usage(answer.body["usage"], len(prompt), generated)
        stream = self.api.stream(COMPLETIONS, completion(prompt, 3000)).collect()
        expect(stream.whole() is None, stream.whole())
        compare(stream.text, text)
        expect(stream.finish == "stop", f"streamed: finish {stream.finish}")
        longer = self.api.post(COMPLETIONS, completion(prompt, generated + 20, ignore_eos=True))
        expect(longer.status == 200, f"with ignore_eos: {longer}")
        choice = longer.body["choices"][0]
        expect(choice["finish_reason"] == "length", f"with ignore_eos: finish {choice['finish_reason']}")
        compare(choice["text"], self.reference.text(prompt, generated + 20))
        expect(choice["text"].startswith(text) and choice["text"] != text, "with ignore_eos: the text did not go on")
        return f"finish stop long before max_tokens, whole and streamed, {seen}; with ignore_eos it goes on to length"

    def _ends_by_itself(self):
        """A prompt whose text ends with EOS after a reasonable number of tokens, and the answer to it."""
        for i in range(200):
            prompt = f"a story with an end, take {i}"
            answer = self.reference.answer(prompt, 300)
            if answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] > 10:
                return prompt, answer
        raise CheckFailed("no prompt found at which the engine emits EOS")

    def two_workers(self):
        second = self._worker()
        self.stack.wait_served(self.api, [self.first, second])
        workers = (self.first, second)
        before = [len(w.calls()) for w in workers]
        for i in range(20):
            prompt = f"shared {i}"
            answer = self.api.post(COMPLETIONS, completion(prompt, 8, ignore_eos=True))
            expect(answer.status == 200, str(answer))
            compare(answer.body["choices"][0]["text"], self.reference.text(prompt, 8))
        shares = [len(w.calls()) - n for w, n in zip(workers, before)]
        expect(sum(shares) == 20 and min(shares) >= 5, f"20 requests were shared {shares}")
        return f"20 requests shared {shares[0]} and {shares[1]}, texts equal"

    def hang_up(self):
        prompt = "a long story that nobody hears to the end"
        stream = self.api.stream(COMPLETIONS, completion(prompt, 10000, ignore_eos=True))
        while len(stream.text) < 25:
            expect(stream.next() is not None, f"the stream ended early: {stream.whole()}")
        left = stream.hang_up()
        wait_for("a cancel at the engine", 10, lambda: self._newest_call(prompt).cancels, pause=0.01)
        took = time.monotonic() - left
        expect(took < 1, f"the cancel came only after {took:.2f} s")
        wait_for("the engine to be through with it", 5, lambda: self._newest_call(prompt).finish)
        time.sleep(1.5)  # the time in which a second cancel would show
        call = self._newest_call(prompt)
        expect(call.cancels == 1, f"{call.cancels} cancels")
        expect(call.tokens < 2000, f"the engine generated {call.tokens} tokens")
        return f"one cancel after {took * 1000:.0f} ms, engine ended after {call.tokens} of 10000 tokens ({call.finish})"

    def refusals(self):
        pinned = {"x-dynamo-worker-instance-id": str(self.first.instance_id), "x-dynamo-dp-rank": "9"}
        cases = [
            ("two choices of greedy sampling", completion("x", 4, n=2), {}, "greedy"),
            ("a token id outside the vocabulary", completion([model.PRINTABLE + 9], 4), {}, "vocabulary"),
            ("a thinking budget", completion("x", 4, nvext={"max_thinking_tokens": 5}), {}, "max_thinking_tokens"),
            ("a negative seed", completion("x", 4, seed=-1), {}, "seed"),
            ("a rank that does not exist", completion("x", 4), pinned, "rank"),
        ]
        before = sum(len(w.calls()) for w in self.stack.workers)
        seen = []
        for what, body, headers, words in cases:
            answer = self.api.post(COMPLETIONS, body, headers)
            message = answer.body.get("message", "") if isinstance(answer.body, dict) else ""
            expect(answer.status == 400 and words in message, f"{what}: wanted 400 with the word {words!r}, got {answer}")
            seen.append(f"{what}: {message!r}")
            stream = self.api.stream(COMPLETIONS, body, headers).collect()
            expect(words in str(stream.error), f"{what}, streamed: wanted the word {words!r}, got {stream.status} {stream.error}")
        after = sum(len(w.calls()) for w in self.stack.workers)
        expect(after == before, f"{after - before} refused requests reached the engine")
        return "400 " + "; ".join(seen)

    def engine_error(self):
        body = chat("hello fox", 8, nvext={"cache_salt": "sim:request-error"})
        answer = self.api.post(CHAT, body)
        wanted = {"message": "Internal server error", "type": "Internal Server Error", "code": 500,
                  "details": {"backend_status": 500}}
        expect((answer.status, answer.body) == (500, wanted), f"wanted HTTP 500 {wanted}, got {answer}")
        error = '{"error":{"message":"Internal server error","type":"internal_server_error","code":500}}'
        stream = self.api.stream(CHAT, body).collect()
        expect((stream.status, stream.raw) == (200, [error, "[DONE]"]),
               f"streamed: wanted HTTP 200 with {error} and [DONE], got {stream.status} {stream.raw or stream.error}")
        later = self.api.stream(CHAT, chat("hello fox", 8, nvext={"cache_salt": "sim:request-error:3"})).collect()
        expect(later.status == 200 and later.raw[-2:] == [error, "[DONE]"] and len(later.raw) > 2,
               f"after 3 tokens: wanted chunks, then {error} and [DONE], got {later.status} {later.raw or later.error}")
        after = self.api.post(CHAT, chat("hello fox", 8))
        expect(after.status == 200, f"the next request: {after}")
        return "500 as recorded; streamed an error event and [DONE], at once and after 3 tokens; the next request is served"

    def _newest_call(self, prompt):
        """The engine's last call with a prompt of this length."""
        calls = [c for w in self.stack.workers for c in w.calls() if c.prompt_tokens == len(prompt)]
        expect(calls, "the request never reached an engine")
        return calls[-1]

    checks = [
        ("model listed", listed),
        ("no common disk", no_common_disk),
        ("chat", chat),
        ("chat streamed", chat_streamed),
        ("completions", completions),
        ("completions streamed", completions_streamed),
        ("usage of a repeated prompt", cached_usage),
        ("stop string", stop_string),
        ("EOS", eos),
        ("client hangs up", hang_up),
        ("worker refuses", refusals),
        ("engine request error", engine_error),
        ("two workers share", two_workers),
    ]
