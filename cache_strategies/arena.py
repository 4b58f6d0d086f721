"""All KV memory of a device: one allocation, divided into pages that each have one owner (a strategy instance).

Knows bytes and owners; neither layers nor tokens. An owner has a floor (the number of pages reserved for it) and a
limit (the maximum number of pages it may hold). Both can change while the server runs, without copying anything.

A gradual arena can be used before the operating system has provided all of its memory. Untouched pages cannot be
allocated yet; floors and limits are computed as if they could. If the system runs out of memory, the arena shrinks to
the pages it has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_strategies.reserved_memory import ReservedMemory
from kernels.memory import allocate

PAGES_PER_STRETCH = 1024
FREE, UNTOUCHED = 0, 255  # marks of pages without an owner; owners have the marks between


class Owner(Protocol):
    """A cache that allocates pages from the arena, some of which may be idle: unused, but kept for reuse."""

    def idle_pages(self) -> int:
        """Return the number of pages that reclaim() could free."""
        ...

    def reclaim(self, pages: int) -> int:
        """Free idle pages until at least `pages` are freed or none is left; return the number freed."""
        ...

    def pinned_pages(self) -> Collection[int]:
        """Return the numbers of the pages with pinned blocks, which cannot be reclaimed."""
        ...


@dataclass
class _Share:
    """One owner's share of the arena: its floor, its limit and the pages it holds. All sizes are in pages."""

    owner: Owner
    mark: int  # the byte that marks the owner's pages
    floor: int
    limit: int
    held: int = 0
    max_sequence_pages: int = 0  # number of pages of the owner's longest sequence, which must always fit
    run: int = 1  # number of consecutive pages of a block
    drain_limit: int = 0  # temporary limit while running sequences hold more than a lowered `limit`; 0: none
    num_reclaimed: int = 0  # number of idle pages that have been reclaimed from the owner so far

    @property
    def max_pages(self) -> int:
        """The maximum number of pages that the owner may hold now."""
        return self.drain_limit or self.limit

    @property
    def num_reclaimable(self) -> int:
        """The number of the owner's idle pages beyond its floor, which may be reclaimed for other owners."""
        return min(self.owner.idle_pages(), max(0, self.held - self.floor))


class Arena:
    """The pages of the KV memory, and their owners.

    Single pages are allocated from the low end and runs of consecutive pages from the high end, to limit fragmentation.
    """

    def __init__(
        self,
        pages: int,
        page_bytes: int,
        device: torch.device | str = "cpu",
        *,
        gradual: bool = False,
        memory: Tensor | None = None,
    ) -> None:
        """Allocate and touch `pages` pages, so that no later write can fail for lack of memory.

        If `memory` is given, it is used as it is. With `gradual` (CPU only) just addresses are reserved; touch() and
        touch_rest() provide the memory. Raises OSError or RuntimeError if there is not enough memory.
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
        self._low, self._high = (0, pages) if gradual else (pages, pages)  # pages [low, high) are untouched
        self.total_pages = pages  # number of usable pages, and of untouched ones that are expected to become usable
        self._marks = bytearray(pages)  # a byte per page: its owner's mark, or FREE; find() searches it quickly
        # A byte for each stretch of PAGES_PER_STRETCH pages, 1 if no page in it is free: a search skips the stretch.
        self._full_stretches = bytearray(-(-pages // PAGES_PER_STRETCH))
        self._num_free = pages
        self.num_refusals = 0  # how often an owner could not get what it asked for
        self._shares: dict[str, _Share] = {}
        if self._reserved:
            self._set_marks(0, pages, UNTOUCHED)
            weakref.finalize(self, self._reserved.stop)

    # ---------------------------------------------------------------- gradual memory
    def touch(self, pages: int) -> None:
        """Make at least `pages` pages usable at each end that owners allocate from.

        Blocks of one page are allocated at the low end and runs at the high end; an unused end is not touched. Raises
        MemoryError if the operating system has not enough memory.
        """
        if self._reserved is None:
            return
        runs = {share.run > 1 for share in self._shares.values() if share.max_sequence_pages}
        size = pages * self.page_bytes
        self._reserved.touch(below=size if runs != {True} else 0, above=size if True in runs else 0)
        self.add_touched_pages()

    def touch_rest(self, get_free_memory: Callable[[], int]) -> None:
        """Touch the remaining pages in a background thread, as long as `get_free_memory` returns enough free bytes.

        Touched pages can be allocated after the next call of add_touched_pages().
        """
        if self._reserved is not None:
            self._reserved.touch_rest(get_free_memory)

    def add_touched_pages(self) -> bool:
        """Make the pages touched since the last call available for allocation; return whether anything has changed.

        If memory ran out before all pages were touched, lower `total_pages` to the usable ones.
        """
        if self._reserved is None:
            return False
        is_finished = self._reserved.is_finished  # read first: until it is True, a thread moves low_end and high_start
        low, high = self._reserved.low_end // self.page_bytes, -(-self._reserved.high_start // self.page_bytes)
        if self._reserved.low_end == self._reserved.high_start:
            low = high = self.pages
        changed = is_finished or (low, high) != (self._low, self._high)
        self._set_marks(self._low, min(low, self._high), FREE)
        self._set_marks(max(high, low), self._high, FREE)
        self._low, self._high = low, high
        if is_finished:
            self._reserved = None
            if low < high:
                self._shrink()
        return changed

    def _shrink(self) -> None:
        """Drop the untouched pages, and lower floors and limits in proportion, so that longest sequences still fit."""
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
        """The number of pages that the operating system has provided: free or allocated."""
        return self.pages - (self._high - self._low)

    @property
    def num_untouched_pages(self) -> int:
        """The number of pages that the operating system has not provided yet."""
        return self.total_pages - self.num_usable_pages

    # ---------------------------------------------------------------- owners and their pages

    def register_owner(self, name: str, owner: Owner, *, floor: int = 0, limit: int | None = None) -> None:
        """Register an owner with a floor and a limit in pages; a limit of None is the whole arena.

        If there is an owner of this name, the new one takes its place, with its share and its pages.
        """
        if name in self._shares:
            self._shares[name].owner = owner
            return
        mark = len(self._shares) + 1
        assert mark < UNTOUCHED, "too many owners"
        self._shares[name] = _Share(owner, mark, floor, self.total_pages if limit is None else limit)

    def get_owner(self, name: str) -> Owner:
        """Return the owner that is registered under a name."""
        return self._shares[name].owner

    def allocate(self, owner: str, run: int = 1) -> int | None:
        """Allocate `run` consecutive pages, reclaiming idle ones if needed; return the first, or None if none fit."""
        share = self._shares[owner]
        while True:
            page = self._find_free_run(run) if self._is_within_share(share, run) else -1
            if page >= 0:
                self._mark_pages(share, page, run, taken=True)
                return page
            if not self._reclaim(share, run):
                self.num_refusals += 1
                return None

    def set_longest_sequence(self, owner: str, longest: int, run: int) -> None:
        """Set the number of pages of an owner's longest sequence, and `run`, the consecutive pages of each block."""
        self._shares[owner].max_sequence_pages, self._shares[owner].run = longest, run

    def release(self, owner: str, page: int, run: int = 1) -> None:
        """Free `run` consecutive pages of an owner, from `page` on. Raises ValueError if they are not the owner's."""
        share = self._shares[owner]
        if not 0 <= page <= self.pages - run or self._marks[page : page + run] != bytes([share.mark]) * run:
            raise ValueError(f"pages {page} to {page + run - 1} do not belong to {owner!r}: were they released before?")
        self._mark_pages(share, page, run, taken=False)

    def owns(self, owner: str, pages: NDArray[np.int64]) -> bool:
        """Return whether all these pages belong to an owner."""
        marks = np.frombuffer(self._marks, np.uint8)
        return bool((marks[pages] == self._shares[owner].mark).all())

    def release_all(self, owner: str) -> int:
        """Free all pages of an owner, whatever it uses them for; return their number."""
        share, page, num_held = self._shares[owner], 0, self._shares[owner].held
        while (page := self._marks.find(share.mark, page)) >= 0:
            self._mark_pages(share, page, 1, taken=False)
        return num_held

    def set_share(self, owner: str, *, floor: int, limit: int) -> None:
        """Set an owner's floor and limit in pages; idle pages beyond a lower limit are freed at once."""
        share = self._shares[owner]
        share.floor, share.limit = floor, limit
        self.drain(owner, 0)

    def drain(self, owner: str, needed: int) -> None:
        """Let an owner hold up to `needed` pages, even beyond its limit, until this is called again.

        The owner's idle pages beyond the limit are reclaimed.
        """
        share = self._shares[owner]
        share.drain_limit = needed if needed > share.limit else 0
        if share.held > share.limit:
            self._reclaim_from(share, share.held - share.limit)

    def draining(self, owner: str) -> bool:
        """Return whether an owner may hold more pages than its (lowered) limit until its running sequences end."""
        return self._shares[owner].drain_limit > 0

    def at_limit(self, owner: str) -> bool:
        """Return whether an owner's limit allows no further block until its own sequences free memory."""
        share = self._shares[owner]
        return share.held - share.owner.idle_pages() + share.run > share.max_pages

    def has_room(self, owner: str, run: int) -> bool:
        """Return whether an owner could allocate `run` consecutive pages without reclaiming idle ones."""
        has_room = self._is_within_share(self._shares[owner], run) and self._find_free_run(run) >= 0
        self.num_refusals += not has_room
        return has_room

    def can_allocate(self, owner: str, pages: int) -> bool:
        """Return whether an owner could allocate `pages` single pages if idle ones were reclaimed."""
        can = pages <= self.count_available_pages(owner)
        self.num_refusals += not can
        return can

    def count_available_pages(self, owner: str) -> int:
        """Return how many single pages an owner could allocate if idle ones were reclaimed; negative beyond its limit.

        Changes nothing.
        """
        share = self._shares[owner]
        others = [s for s in self._shares.values() if s is not share]
        own_idle = share.owner.idle_pages()
        free = self._num_free + own_idle + sum(s.num_reclaimable for s in others)
        promised = sum(max(0, s.floor - s.held) for s in others)
        unpromised = free + self.num_untouched_pages - promised
        return min(free, unpromised, share.max_pages - share.held + own_idle)

    def explain_refusal(
        self, owner: str, *, floor: int | None = None, limit: int | None = None, pinned: Collection[int] | None = None
    ) -> str | None:
        """Return why an owner cannot get this floor and limit, or pin these pages; None if it can.

        The reason is that the longest sequence of some owner would not fit. For an argument of None the current value
        is kept.
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
                return f"the longest sequence of strategy {name!r}, {needed} bytes, would not fit"
        return None

    def _count_pages_in_runs(self, pinned: Collection[int], shares: Collection[_Share]) -> dict[int, int]:
        """Return, by number of pages in a run, how many usable pages form whole runs between the `pinned` pages."""
        gaps: list[int] = []
        for first, end in ((0, self._low), (self._high, self.pages)):
            edges = [first - 1, *sorted(page for page in pinned if first <= page < end), end]
            gaps += [after - before - 1 for before, after in pairwise(edges)]
        return {run: sum(gap // run * run for gap in gaps) for run in {share.run for share in shares}}

    def get_share(self, owner: str) -> tuple[int, int]:
        """Return (floor, limit) of an owner, in pages."""
        return self._shares[owner].floor, self._shares[owner].limit

    def num_reclaimed_pages(self, owner: str) -> int:
        """Return the number of idle pages that have been reclaimed from an owner so far."""
        return self._shares[owner].num_reclaimed

    def num_held_pages(self, owner: str) -> int:
        return self._shares[owner].held

    def mark_owners(self) -> tuple[NDArray[np.uint8], Mapping[int, str]]:
        """Return (the mark of each page, as a copy; the owners' names by mark); others are FREE and UNTOUCHED."""
        names = {share.mark: name for name, share in self._shares.items()}
        return np.frombuffer(self._marks, np.uint8).copy(), names

    def capacity(self, owner: str) -> int:
        """Return the number of pages that an owner could hold if all others shrank to their floors."""
        others = sum(s.floor for name, s in self._shares.items() if name != owner)
        return max(0, min(self._shares[owner].limit, self.total_pages - others))

    @property
    def num_free_pages(self) -> int:
        return self._num_free

    @property
    def usage(self) -> float:
        """The share of usable pages that are in use, 0 to 1; idle pages count as free."""
        idle = sum(s.owner.idle_pages() for s in self._shares.values())
        return 1 - (self._num_free + idle) / self.num_usable_pages

    def _is_within_share(self, share: _Share, run: int) -> bool:
        promised = sum(max(0, s.floor - s.held) for s in self._shares.values() if s is not share)
        return share.held + run <= share.max_pages and self._num_free + self.num_untouched_pages - run >= promised

    def _find_free_run(self, run: int) -> int:
        if run > 1:
            return self._marks.rfind(bytes(run))
        stretch = self._full_stretches.find(0)
        return self._marks.find(FREE, stretch * PAGES_PER_STRETCH) if stretch >= 0 else -1

    def _mark_pages(self, share: _Share, page: int, run: int, *, taken: bool) -> None:
        self._set_marks(page, page + run, share.mark if taken else FREE)
        share.held += run if taken else -run

    def _set_marks(self, first: int, end: int, mark: int) -> None:
        """Mark the pages [first, end) as free, or as not free. All of them must change; the range may be empty."""
        if end <= first:
            return
        self._marks[first:end] = bytes([mark]) * (end - first)
        for stretch in range(first // PAGES_PER_STRETCH, (end - 1) // PAGES_PER_STRETCH + 1):
            self._full_stretches[stretch] = (
                self._marks.find(FREE, stretch * PAGES_PER_STRETCH, (stretch + 1) * PAGES_PER_STRETCH) < 0
            )
        self._num_free += end - first if mark == FREE else first - end

    def _reclaim(self, share: _Share, run: int) -> int:
        """Reclaim up to `run` idle pages for the owner of `share`; return the number freed.

        If the owner is at its limit, only its own idle pages are reclaimed; else also those that other owners hold
        beyond their floors. If enough pages are free but not consecutive, even other owners' idle pages within their
        floors are reclaimed: a floor guarantees a number of pages, not their contents.
        """
        if share.held + run > share.max_pages:
            return self._reclaim_from(share, run)
        scattered = self._is_within_share(share, run)
        for other in self._shares.values():
            spare = run if other is share or scattered else min(run, other.num_reclaimable)
            if spare > 0 and (num_freed := self._reclaim_from(other, spare)):
                return num_freed
        return 0

    def _reclaim_from(self, share: _Share, pages: int) -> int:
        num_freed = share.owner.reclaim(pages)
        share.num_reclaimed += num_freed
        return num_freed

    def check_integrity(self) -> None:
        """Assert that the numbers of free, held and untouched pages are consistent."""
        assert self._num_free == self._marks.count(FREE)
        stretches = [self._marks[at : at + PAGES_PER_STRETCH] for at in range(0, self.pages, PAGES_PER_STRETCH)]
        assert list(self._full_stretches) == [FREE not in stretch for stretch in stretches]
        assert all(share.held == self._marks.count(share.mark) for share in self._shares.values())
        assert sum(s.held for s in self._shares.values()) == self.num_usable_pages - self._num_free
        assert self._marks[self._low : self._high] == bytes([UNTOUCHED]) * (self._high - self._low)
