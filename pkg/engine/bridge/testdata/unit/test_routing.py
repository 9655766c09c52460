"""The stand-in's routers against numbers from TensorRT-LLM's own tests, and a few derived ones."""
import os
import unittest
from dataclasses import dataclass
from typing import Optional

os.environ["STANDIN_API"] = "rc29"

from tensorrt_llm import _routing  # noqa: E402


@dataclass
class Request:
    ident: int
    rank: Optional[int] = None
    relax: bool = True
    conversation: Optional[str] = None
    tokens: int = 3


def by_rank(placed):
    out = {}
    for request, rank in placed:
        out.setdefault(rank, []).append(request.ident)
    return out


class Default(unittest.TestCase):
    def check(self, active, flags, want):
        waiting = [Request(i, rank, relax) for i, (rank, relax) in enumerate(flags)]
        router = _routing.DefaultADPRouter(4)
        router.tokens = [10, 15, 20, 25]
        batch = _routing.admit(waiting, active, 3)
        self.assertEqual(by_rank(router.route(batch, active, 3)), want)

    def test_vectors(self):
        free, rows = (None, True), [
            ([0, 0, 0, 0], 7, {0: [0, 1], 1: [2, 3], 2: [4, 5], 3: [6]}),
            ([1, 2, 3, 0], 13, {0: [0, 1], 1: [2], 3: [3, 4, 5]}),
            ([0, 0, 0, 0], 13, {0: [0, 1, 3], 1: [2, 4, 6], 2: [5, 7, 9], 3: [8, 10, 11]}),
            ([3, 1, 3, 0], [(0, False), (0, True)], {1: [1]}),
            ([3, 2, 3, 3], [(0, False), (0, True)], {1: [1]}),
            ([2, 1, 3, 0], [(1, False), (3, False)], {1: [0], 3: [1]}),
            ([3, 3, 3, 1], [(0, True), (1, True), (2, True)], {3: [0, 1]}),
            ([3, 3, 3, 0], [(0, False), (1, True), (3, False)], {3: [2, 1]}),
        ]
        for active, flags, want in rows:
            with self.subTest(active=active, flags=flags):
                self.check(active, [free] * flags if isinstance(flags, int) else flags, want)


class Conversation(unittest.TestCase):
    def route(self, router, idents, active=None, cap=100, **fields):
        active = [0] * router.ranks if active is None else active
        batch = [Request(i, conversation=c, **fields) for i, c in enumerate(idents)]
        return by_rank(router.route(batch, active, cap))

    def test_new_conversations_are_spread_and_then_stay(self):
        router = _routing.ConversationAwareADPRouter(4)
        first = self.route(router, "ABCD")
        self.assertEqual(first, {0: [0], 1: [1], 2: [2], 3: [3]})
        self.assertEqual(self.route(router, "ABCD"), first)

    def test_requests_without_a_conversation_are_balanced_and_forgotten(self):
        router = _routing.ConversationAwareADPRouter(4)
        placed = self.route(router, [None] * 8)
        self.assertEqual(sorted(map(len, placed.values())), [2, 2, 2, 2])
        self.assertEqual(router.homes, {})

    def test_the_oldest_sessions_are_forgotten(self):
        router = _routing.ConversationAwareADPRouter(2, max_sessions=2)
        self.route(router, ["c0", "c1", "c2", "c3", "c4"])
        self.assertEqual(list(router.homes), ["c3", "c4"])

    def test_an_explicit_first_rank_becomes_the_home(self):
        router = _routing.ConversationAwareADPRouter(4)
        self.assertEqual(self.route(router, "A", rank=2, relax=False), {2: [0]})
        self.assertEqual(self.route(router, "A"), {2: [0]})
        self.assertEqual(self.route(router, "A", rank=1, relax=False), {2: [0]})
        self.assertEqual(router.homes, {"A": 2})

    def test_a_full_home_overflows_and_stays_home(self):
        router = _routing.ConversationAwareADPRouter(2)
        router.homes["A"] = 0
        self.assertEqual(self.route(router, "A", active=[5, 0], cap=5), {1: [0]})
        self.assertEqual(router.homes, {"A": 0})

    def test_least_queued(self):
        router = _routing.ConversationAwareADPRouter(4, placement="least_queued")
        self.assertEqual(self.route(router, "A", active=[5, 1, 3, 4]), {1: [0]})
        router = _routing.ConversationAwareADPRouter(4, placement="least_queued")
        placed = self.route(router, "ABCD", active=[3, 0, 2, 3])
        self.assertEqual({rank: len(ids) for rank, ids in placed.items()}, {1: 3, 2: 1})
        router = _routing.ConversationAwareADPRouter(4, placement="least_queued")
        self.assertEqual(self.route(router, ["A", "B", None, "A", "C", None, "B"],
                                    active=[2, 5, 0, 1]), {0: [4], 2: [0, 1, 3, 6], 3: [2, 5]})

    def test_round_robin_with_gaps(self):
        router = _routing.ConversationAwareADPRouter(4)
        placed = self.route(router, ["A", "B", "C", None, "A", "B", "E", None, "C"])
        self.assertEqual(placed, {0: [0, 4, 6], 1: [1, 5, 7], 2: [2, 8], 3: [3]})
        self.assertEqual(router.cursor, 2)

    def test_one_conversation_takes_as_much_as_a_rank_holds(self):
        router = _routing.ConversationAwareADPRouter(8)
        self.assertEqual(self.route(router, ["A"] * 40, cap=256), {0: list(range(40))})

    def test_nobody_passes_the_hard_cap(self):
        router, active = _routing.ConversationAwareADPRouter(4), [40, 40, 40, 64]
        placed = self.route(router, [None] * 8, active=active, cap=64)
        self.assertEqual(sum(map(len, placed.values())), 8)
        self.assertLessEqual(max(active), 64)


if __name__ == "__main__":
    unittest.main()
