"""A sequence under `streaming`: its position within the cache follows from its last boundary."""

from __future__ import annotations

from cache_strategies.compressed.seat import CompressedSeat, KeptTokens


class StreamingSeat(CompressedSeat):
    """A seat in which a token's position is its number among the tokens that are kept."""

    __slots__ = ("max_kept",)

    def __init__(self, index: int, groups: list[KeptTokens], max_kept: int) -> None:
        super().__init__(index, groups)
        self.max_kept = max_kept  # sinks and window: the most tokens that stay at a boundary

    @property
    def position(self) -> int:
        return self.position_after(self.boundary) + self.num_new

    def position_after(self, boundary: int) -> int:
        """Return the position of the next token after a boundary."""
        return min(boundary, self.max_kept)
