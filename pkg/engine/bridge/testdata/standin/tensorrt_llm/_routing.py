"""Which attention-DP rank serves a request: the rules a caller can observe.

A request here has conversation (text or None), rank (int or None), relax (bool) and tokens.
active[r] counts the requests on rank r, cap is the most one rank takes. route() gives each
request of the batch its rank, and updates active.
"""
import math
from collections import OrderedDict

from ._switch import BINDS_RANK


def admit(waiting, active, cap):
    """Takes the requests out of waiting that may run now, in order.

    A strict rank that is full holds its request back without holding up those behind it.
    """
    load, room, taken, kept = list(active), len(active) * cap - sum(active), [], []
    for request in waiting:
        strict = request.rank is not None and not request.relax
        if room <= 0 or (strict and load[request.rank] >= cap):
            kept.append(request)
            continue
        if strict:
            load[request.rank] += 1
        room -= 1
        taken.append(request)
    waiting[:] = kept
    return taken


def soft_cap(active, new, multiplier, cap):
    share = math.ceil(multiplier * math.ceil((sum(active) + new) / len(active)))
    return min(max(share, max(active)), cap)


class DefaultADPRouter:
    """Honours a rank with room, else evens out the number of prompt tokens."""

    def __init__(self, ranks):
        self.tokens = [0] * ranks

    def route(self, batch, active, cap):
        placed, rest = [], []
        for request in sorted(batch, key=lambda r: r.relax or r.rank is None):
            if request.rank is None or active[request.rank] >= cap:
                rest.append(request)
            else:
                placed.append(self._place(request, request.rank, active))
        share = soft_cap(active, len(rest), 1, cap)
        for request in sorted(rest, key=lambda r: -r.tokens):
            room = [r for r in range(len(active)) if active[r] < share]
            rank = min(room, key=lambda r: (self.tokens[r], active[r], r))
            placed.append(self._place(request, rank, active))
        return placed

    def _place(self, request, rank, active):
        active[rank] += 1
        self.tokens[rank] += request.tokens
        return request, rank

    def ended(self, request, rank):
        self.tokens[rank] -= request.tokens


class ConversationAwareADPRouter:
    """Keeps a conversation on the rank of its first turn for as long as it is remembered."""

    def __init__(self, ranks, max_sessions=1 << 16, multiplier=2.0, placement="round_robin"):
        self.ranks, self.placement = ranks, placement
        self.max_sessions, self.multiplier = max(1, max_sessions), max(1.0, multiplier)
        self.homes = OrderedDict()
        self.cursor = 0

    def ended(self, request, rank):
        """The end of a request does not end its conversation."""

    def route(self, batch, active, cap):
        batch = sorted(batch, key=lambda r: r.relax)
        placed, deferred = self._explicit(batch, active, cap)
        soft = soft_cap(active, len(deferred), self.multiplier, cap)
        for request in deferred:
            home = self.homes.get(request.conversation)
            if home is not None and active[home] < cap:
                self.homes.move_to_end(request.conversation)
                rank = home
            else:
                rank = self._place(active, soft)
                if home is None:
                    self._bind(request, rank)
            active[rank] += 1
            placed.append((request, rank))
        return placed

    def _explicit(self, batch, active, cap):
        """Requests placed by their own rank, and the rest."""
        placed, deferred = [], []
        for request in batch:
            bound = BINDS_RANK and request.conversation in self.homes
            if bound or request.rank is None or active[request.rank] >= cap:
                deferred.append(request)
                continue
            if BINDS_RANK:
                self._bind(request, request.rank)
            active[request.rank] += 1
            placed.append((request, request.rank))
        return placed, deferred

    def _bind(self, request, rank):
        if request.conversation is None:
            return
        self.homes[request.conversation] = rank
        self.homes.move_to_end(request.conversation)
        while len(self.homes) > self.max_sessions:
            self.homes.popitem(last=False)

    def _place(self, active, soft):
        if self.placement == "round_robin":
            for _ in range(self.ranks):
                rank, self.cursor = self.cursor, (self.cursor + 1) % self.ranks
                if active[rank] < soft:
                    return rank
        room = [r for r in range(self.ranks) if active[r] < soft] or list(range(self.ranks))
        return min(room, key=lambda r: (active[r], r))


if BINDS_RANK:
    # Callers look for this name to learn that an explicit first rank becomes the home.
    ConversationAwareADPRouter._assign_new_conversation_explicit_dp_ranks = (
        ConversationAwareADPRouter._explicit)
