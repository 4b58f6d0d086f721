"""Counts in a replica how often routers expected the right number of cached tokens, as metrics beside the engine's.

Routers cannot count this: each API process has one, and a request for /metrics reaches any of these processes.
"""

from __future__ import annotations

from array import array
from collections import Counter

from server.cluster.messages import Routed
from server.metrics.exposition import FamilyShape, Series, decode_families, decode_snapshot, encode_snapshot

# Names without the suffix `_total`, with their help texts
REQUESTS = "kvmux_router_requests", "Requests sent to the replica, by the router's reason"
EXPECTED = "kvmux_router_expected_cached_tokens", "Prompt tokens that the router expected to be cached in the replica"
FOUND = "kvmux_router_found_cached_tokens", "Prompt tokens of routed requests that the replica found in its cache"
RIGHT = "kvmux_router_right_expectations", "Requests that found as many cached tokens as the router expected"


class RouterCounts:
    """The counts of one replica."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()  # by reason
        self._expected = self._found = self._right = 0

    def record(self, routed: Routed, cached_tokens: int) -> None:
        """Count a request that was admitted, and whose first `cached_tokens` tokens were in the cache."""
        self._requests[routed.reason] += 1
        self._expected += routed.expected_cached_tokens
        self._found += cached_tokens
        self._right += routed.expected_cached_tokens == cached_tokens

    def append_to(self, encoded: bytes) -> bytes:
        """Return an engine's encoded Snapshot with these metrics added at its end."""
        snapshot = decode_snapshot(encoded)
        reasons = sorted(self._requests)
        by_reason = tuple(Series((reason,)) for reason in reasons)
        families = [
            *decode_families(bytes(snapshot.families)),
            FamilyShape("counter", *REQUESTS, ("reason",), (), by_reason),
            *(FamilyShape("counter", *name, (), (), (Series(()),)) for name in (EXPECTED, FOUND, RIGHT)),
        ]
        numbers = [*(self._requests[each] for each in reasons), self._expected, self._found, self._right]
        return encode_snapshot(families, snapshot.numbers + array("d", numbers).tobytes())
