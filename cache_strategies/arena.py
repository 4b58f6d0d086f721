"""All KV memory of a device: one allocation, cut into pages that each have one owner.

Knows bytes and owners; neither layers, nor tokens, nor strategies. An owner has a floor (pages nobody else may take)
and a limit (pages it may hold); both are plain numbers, so shares change while the server runs and nothing is copied.

A gradual arena is in use before the system has given it all of its memory: pages that are not there yet count as taken,
and floors and limits as of the whole, for they will be. If they never are, the arena is as large as what there is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from cache_strategies.reserved_memory import ReservedMemory
from kernels.memory import allocate

PAGES_PER_STRETCH = 1024


class Owner(Protocol):
    """An object that holds pages, and keeps some in case they are wanted again."""

    def idle_pages(self) -> int:
        """Return the number of pages it could give back."""
        ...

    def reclaim(self, pages: int) -> int:
        """Give back idle pages until at least `pages` are given, or none is left; return the number given."""
        ...

    def pinned_pages(self) -> Collection[int]:
        """Return the pages that it will not give back for a long time."""
        ...


@dataclass
class _Share:
    """What one owner holds and may hold, in pages."""

    owner: Owner
    floor: int
    limit: int
    held: int = 0
    max_sequence_pages: int = 0  # pages of its longest sequence, for which there must always be room,
    run: int = 1  # so many of them in one piece
    drain_limit: int = 0  # pages it may hold until sequences that run have ended; 0: its limit holds
    num_reclaimed: int = 0  # idle pages it had to give so far

    @property
    def max_pages(self) -> int:
        """Pages it may hold now."""
        return self.drain_limit or self.limit

    @property
    def num_reclaimable(self) -> int:
        """Idle pages that others may have: those above the floor."""
        return min(self.owner.idle_pages(), max(0, self.held - self.floor))


class Arena:
    """Pages of bytes. Single pages are taken from below and runs from above, so that they fragment each other least."""

    def __init__(
        self,
        pages: int,
        page_bytes: int,
        device: torch.device | str = "cpu",
        *,
        gradual: bool = False,
        memory: Tensor | None = None,
    ) -> None:
        """Allocate and touch all pages: nothing grows, or fails, later. A `memory` that is given is not touched.

        `gradual`, for a CPU's memory: addresses alone, until touch() and touch_rest() are called. Raises OSError or
        RuntimeError if there is no room.
        """
        assert pages > 0
        assert page_bytes > 0
        self.pages = pages
        self.page_bytes = page_bytes
        self._reserved = ReservedMemory(pages * page_bytes) if gradual else None
        if memory is None:
            memory = self._reserved.memory if self._reserved else allocate(pages * page_bytes, device)
        self.memory = memory
        assert self.memory.nbytes == pages * page_bytes
        self._low, self._high = (0, pages) if gradual else (pages, pages)  # pages between them have not come
        self.total_pages = pages  # that have come or will come
        self._taken = bytearray(pages)  # one byte a page: find() and rfind() then search at memory speed
        # Stretches without a free page, so that no search is long.
        self._full_stretches = bytearray(-(-pages // PAGES_PER_STRETCH))
        self._num_free = pages
        self._shares: dict[str, _Share] = {}
        if self._reserved:
            self._set_free(0, pages, free=False)
            weakref.finalize(self, self._reserved.stop)

    # ---------------------------------------------------------------- memory that comes
    def touch(self, pages: int) -> None:
        """Make at least `pages` pages usable at each end that owners take from. Raises MemoryError.

        Runs are taken from above and single pages from below, so these suffice for sequences that take as many.
        """
        if self._reserved is None:
            return
        runs = {share.run > 1 for share in self._shares.values() if share.max_sequence_pages}
        size = pages * self.page_bytes
        self._reserved.touch(below=size if runs != {True} else 0, above=size if True in runs else 0)
        self.add_touched_pages()

    def touch_rest(self, get_free_memory: Callable[[], int]) -> None:
        """Touch the other pages in the background, as long as `get_free_memory` returns enough bytes.

        They can be taken after the next add_touched_pages().
        """
        if self._reserved is not None:
            self._reserved.touch_rest(get_free_memory)

    def add_touched_pages(self) -> bool:
        """Let pages be taken that have come since; if no more come, the arena has no others, and `total_pages` says so.

        Return whether anything has changed.
        """
        if self._reserved is None:
            return False
        is_finished = self._reserved.is_finished  # asked first: what comes in between is seen the next time, or below
        low, high = self._reserved.low_end // self.page_bytes, -(-self._reserved.high_start // self.page_bytes)
        if self._reserved.low_end == self._reserved.high_start:
            low = high = self.pages
        changed = is_finished or (low, high) != (self._low, self._high)
        self._set_free(self._low, min(low, self._high), free=True)
        self._set_free(max(high, low), self._high, free=True)
        self._low, self._high = low, high
        if is_finished:
            self._reserved = None
            if low < high:
                self._shrink()
        return changed

    def _shrink(self) -> None:
        """Give up the pages that have not come: floors and limits become lower, but no sequence loses its room."""
        old_total, self.total_pages = self.total_pages, self.num_usable_pages
        for share in self._shares.values():
            share.floor = share.floor * self.total_pages // old_total
            share.limit = min(
                self.total_pages, max(share.limit * self.total_pages // old_total, share.max_sequence_pages)
            )
        if any(self.explain_refusal(name) for name in self._shares):
            for share in self._shares.values():
                share.floor = 0

    @property
    def num_usable_pages(self) -> int:
        """Pages that have come."""
        return self.pages - (self._high - self._low)

    @property
    def num_untouched_pages(self) -> int:
        """Pages that the system has not given yet, and will."""
        return self.total_pages - self.num_usable_pages

    # ---------------------------------------------------------------- owners and their pages

    def register_owner(self, name: str, owner: Owner, *, floor: int = 0, limit: int | None = None) -> None:
        """Register an owner; without a limit it may take what the floors of others leave."""
        assert name not in self._shares
        self._shares[name] = _Share(owner, floor, self.total_pages if limit is None else limit)

    def take(self, owner: str, run: int = 1) -> int | None:
        """Take `run` consecutive pages and return the first; None if even reclaiming idle pages makes no room."""
        share = self._shares[owner]
        while True:
            page = self._find_free_run(run) if self._is_within_share(share, run) else -1
            if page >= 0:
                self._mark_pages(share, page, run, taken=True)
                return page
            if not self._reclaim(share, run):
                return None

    def set_longest_sequence(self, owner: str, longest: int, run: int) -> None:
        """Note that the owner's longest sequence takes `longest` pages, in pieces of `run`."""
        self._shares[owner].max_sequence_pages, self._shares[owner].run = longest, run

    def release(self, owner: str, page: int, run: int = 1) -> None:
        """Take back pages from an owner."""
        assert self._taken[page : page + run] == b"\1" * run, "page given back twice"
        self._mark_pages(self._shares[owner], page, run, taken=False)

    def set_share(self, owner: str, *, floor: int, limit: int) -> None:
        """Set an owner's floor and limit; idle pages beyond a lower limit are freed at once."""
        share = self._shares[owner]
        share.floor, share.limit = floor, limit
        self.drain(owner, 0)

    def drain(self, owner: str, needed: int) -> None:
        """Let an owner hold what its running sequences need, also beyond its limit; reclaim idle pages beyond it."""
        share = self._shares[owner]
        share.drain_limit = needed if needed > share.limit else 0
        if share.held > share.limit:
            self._reclaim_from(share, share.held - share.limit)

    def draining(self, owner: str) -> bool:
        """Return whether an owner may still hold more than its limit."""
        return self._shares[owner].drain_limit > 0

    def at_limit(self, owner: str) -> bool:
        """Return whether only an owner's own sequences can make room for it."""
        share = self._shares[owner]
        return share.held - share.owner.idle_pages() + share.run > share.max_pages

    def has_room(self, owner: str, run: int) -> bool:
        """Return whether `run` consecutive pages are free, without reclaiming idle ones."""
        return self._is_within_share(self._shares[owner], run) and self._find_free_run(run) >= 0

    def can_take(self, owner: str, pages: int) -> bool:
        """Return whether `pages` single pages could be taken, idle ones reclaimed. Changes nothing."""
        share = self._shares[owner]
        others = [s for s in self._shares.values() if s is not share]
        own_idle = share.owner.idle_pages()
        free = self._num_free + own_idle + sum(s.num_reclaimable for s in others)
        promised = sum(max(0, s.floor - s.held) for s in others)
        enough = pages <= free and free + self.num_untouched_pages - pages >= promised
        return enough and share.held - own_idle + pages <= share.max_pages

    def explain_refusal(
        self, owner: str, *, floor: int | None = None, limit: int | None = None, pinned: Collection[int] | None = None
    ) -> str | None:
        """Return why an owner should not get this share, or pin these pages: a longest sequence would have no room.

        None: there is nothing against it.
        """
        shares, pins = dict(self._shares), {name: s.owner.pinned_pages() for name, s in self._shares.items()}
        shares[owner] = replace(
            shares[owner],
            floor=shares[owner].floor if floor is None else floor,
            limit=shares[owner].limit if limit is None else limit,
        )
        pins[owner] = pins[owner] if pinned is None else pinned
        room = self._count_pages_in_runs({page for pages in pins.values() for page in pages}, shares.values())
        for name, share in shares.items():
            others = sum(max(s.floor, len(pins[n])) for n, s in shares.items() if n != name)
            left = min(share.limit, self.total_pages - others) - len(pins[name])
            if share.max_sequence_pages > left or share.max_sequence_pages > room[share.run]:
                needed = share.max_sequence_pages * self.page_bytes
                return f"{name} would have no room for its longest sequence, {needed} bytes"
        return None

    def _count_pages_in_runs(self, pinned: Collection[int], shares: Collection[_Share]) -> dict[int, int]:
        """Return the usable pages in whole runs, by the length of a run, if only `pinned` pages were taken."""
        gaps: list[int] = []
        for first, end in ((0, self._low), (self._high, self.pages)):
            edges = [first - 1, *sorted(page for page in pinned if first <= page < end), end]
            gaps += [after - before - 1 for before, after in pairwise(edges)]
        return {run: sum(gap // run * run for gap in gaps) for run in {share.run for share in shares}}

    def get_share(self, owner: str) -> tuple[int, int]:
        """Return an owner's floor and limit."""
        return self._shares[owner].floor, self._shares[owner].limit

    def num_reclaimed_pages(self, owner: str) -> int:
        """Return the number of idle pages that an owner has had to give up so far."""
        return self._shares[owner].num_reclaimed

    def num_held_pages(self, owner: str) -> int:
        return self._shares[owner].held

    def capacity(self, owner: str) -> int:
        """Return the number of pages that an owner could hold if all others went down to their floors."""
        others = sum(s.floor for name, s in self._shares.items() if name != owner)
        return max(0, min(self._shares[owner].limit, self.total_pages - others))

    @property
    def num_free_pages(self) -> int:
        return self._num_free

    @property
    def usage(self) -> float:
        """Share of the usable pages that cannot be taken, 0 to 1: idle ones count as free."""
        idle = sum(s.owner.idle_pages() for s in self._shares.values())
        return 1 - (self._num_free + idle) / self.num_usable_pages

    def _is_within_share(self, share: _Share, run: int) -> bool:
        promised = sum(max(0, s.floor - s.held) for s in self._shares.values() if s is not share)
        return share.held + run <= share.max_pages and self._num_free + self.num_untouched_pages - run >= promised

    def _find_free_run(self, run: int) -> int:
        if run > 1:
            return self._taken.rfind(bytes(run))
        stretch = self._full_stretches.find(0)
        return self._taken.find(0, stretch * PAGES_PER_STRETCH) if stretch >= 0 else -1

    def _mark_pages(self, share: _Share, page: int, run: int, *, taken: bool) -> None:
        self._set_free(page, page + run, free=not taken)
        share.held += run if taken else -run

    def _set_free(self, first: int, end: int, *, free: bool) -> None:
        """Mark the pages [first, end), which are not so yet, as free or taken; none if `end` is not above `first`."""
        if end <= first:
            return
        self._taken[first:end] = (b"\0" if free else b"\1") * (end - first)
        for stretch in range(first // PAGES_PER_STRETCH, (end - 1) // PAGES_PER_STRETCH + 1):
            self._full_stretches[stretch] = (
                self._taken.find(0, stretch * PAGES_PER_STRETCH, (stretch + 1) * PAGES_PER_STRETCH) < 0
            )
        self._num_free += end - first if free else first - end

    def _reclaim(self, share: _Share, run: int) -> int:
        """Reclaim idle pages from the owners that may have to give: at its own limit only the owner itself.

        Where enough pages are free and merely scattered, idle ones are given back within floors too: a floor promises
        pages, not what lies in them, and these stay promised.
        """
        if share.held + run > share.max_pages:
            return self._reclaim_from(share, run)
        scattered = self._is_within_share(share, run)
        for other in self._shares.values():
            spare = run if other is share or scattered else min(run, other.num_reclaimable)
            if spare > 0 and (given := self._reclaim_from(other, spare)):
                return given
        return 0

    def _reclaim_from(self, share: _Share, pages: int) -> int:
        given = share.owner.reclaim(pages)
        share.num_reclaimed += given
        return given

    def check_integrity(self) -> None:
        """Check that the counts agree with each other."""
        assert self._num_free == self._taken.count(0)
        stretches = [self._taken[at : at + PAGES_PER_STRETCH] for at in range(0, self.pages, PAGES_PER_STRETCH)]
        assert list(self._full_stretches) == [0 not in stretch for stretch in stretches]
        assert sum(s.held for s in self._shares.values()) == self.num_usable_pages - self._num_free
        assert self._taken[self._low : self._high] == b"\1" * (self._high - self._low)
