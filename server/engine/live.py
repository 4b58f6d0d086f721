"""Describes what an engine holds and does at this moment, for GET /v1/live: pages, instances and requests.

Everything in it changes while the server works; what is fixed or slow to compute is in info.py. Has no text of any
request. Computed only when it is asked for: while no client watches, it costs nothing.
"""

from __future__ import annotations

import base64
from collections import Counter
from time import monotonic, time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cache_strategies.arena import FREE, UNTOUCHED
from cache_strategies.base import KVCache
from cache_strategies.features import PageMarking
from cache_strategies.types import PageState
from server.engine.build import Engine
from server.engine.core import Core
from server.engine.info import describe_memory, describe_share, describe_tokens
from server.engine.isolation.errors import StrategyError
from server.engine.isolation.guard import GuardedCache
from server.engine.scheduling.request import Request

MAX_CELLS = 2**14  # maximum number of cells in the grid of pages: beyond it, each cell stands for several pages
MAX_LISTED_REQUESTS = 1000  # maximum number of requests in the list: the running ones first
SHORTEST_TEXT = 256  # tokens of the shortest text for which it is computed how many more fit


def describe_live(engine: Engine) -> dict[str, Any]:
    """Return the state of an engine as docs/reference/api.md describes it, in objects that can be compared by key."""
    core = engine.core
    scheduler = core.scheduler
    listed = [*scheduler.running, *scheduler.waiting][:MAX_LISTED_REQUESTS]
    running = Counter(request.cache.name for request in scheduler.running)
    waiting = Counter(request.cache.name for request in scheduler.waiting)
    return {
        "object": "live",
        "created": round(time(), 3),
        "memory": describe_memory(core.arena)
        | {
            "page_bytes": core.arena.page_bytes,
            "free_bytes": core.arena.num_free_pages * core.arena.page_bytes,
            "weight_bytes": core.model.weight_bytes,
        },
        "cells": describe_cells(core),
        "instances": {
            info.name: {
                "kind": info.kind,
                **describe_instance(core, core.isolation.caches[info.name], engine.max_seq_len),
                "running": running[info.name],
                "waiting": waiting[info.name],
            }
            for info in engine.instances
        },
        "num_running": len(scheduler.running),
        "num_waiting": len(scheduler.waiting),
        "max_num_seqs": scheduler.limits.max_num_seqs,
        "requests": {f"{request.key[0]}/{request.key[1]}": describe_request(request) for request in listed},
    }


# ---------------------------------------------------------------- pages
def describe_cells(core: Core) -> dict[str, Any]:
    """Return the pages of the arena: the owner and the state of each, or of every n-th if there are many.

    `owners` and `states` are bytes in base64, one for each cell: the number of the owner in `instances`, from 1 on, or
    0 if there is none; and a number in `state_names`.
    """
    marks, names = core.arena.mark_owners()
    states = np.full(len(marks), PageState.IN_USE, np.uint8)
    states[marks == FREE], states[marks == UNTOUCHED] = PageState.FREE, PageState.UNTOUCHED
    for mark, name in names.items():
        if (cache := core.isolation.caches.get(name)) is not None:
            own = marks == mark
            states[own] = read_page_states(cache, len(marks))[own]
    step = -(-len(marks) // MAX_CELLS)
    marks[marks == UNTOUCHED] = FREE
    return {
        "pages_per_cell": step,
        "instances": [name for _, name in sorted(names.items())],
        "state_names": [state.name.lower() for state in PageState],
        "owners": encode_bytes(marks[::step]),
        "states": encode_bytes(states[::step]),
    }


def read_page_states(cache: GuardedCache, num_pages: int) -> NDArray[np.uint8]:
    """Return the `PageState` of each page as its owner knows it; in use if the owner tells nothing, or fails.

    What is written about pages of other owners has to be ignored by the caller.
    """
    states = torch.full((num_pages,), int(PageState.IN_USE), dtype=torch.uint8)
    if cache.is_suspended or not isinstance(cache.inner, PageMarking):
        return states.numpy()
    try:
        cache.call("mark_pages", states)
    except StrategyError:  # was reported by the guard; the pages may be marked in part
        states.fill_(int(PageState.IN_USE))
    return np.where(states.numpy() <= max(PageState), states.numpy(), PageState.IN_USE)


def encode_bytes(values: NDArray[np.uint8]) -> str:
    return base64.b64encode(values.tobytes()).decode()


# ---------------------------------------------------------------- instances
def describe_instance(core: Core, cache: GuardedCache, max_seq_len: int) -> dict[str, Any]:
    """Return an instance's memory by use, its numbers of blocks and tokens, and how many more texts fit."""
    return {
        "state": "quarantined" if cache.name in core.isolation.quarantined else "ok",
        "usage": cache.usage()._asdict(),
        "blocks": cache.blocks()._asdict(),
        **describe_share(core.arena, cache.name),
        **describe_tokens(cache.count_tokens()),
        "fits": count_fitting_texts(core, cache, max_seq_len),
    }


def count_fitting_texts(core: Core, cache: KVCache, max_seq_len: int) -> dict[str, int]:
    """Return how many more texts have room in an instance, by their number of tokens; empty if it does not say.

    Idle memory counts as room. Texts that share their beginnings need less, so that more of them may fit.
    """
    lengths = [SHORTEST_TEXT << i for i in range(20) if SHORTEST_TEXT << i < max_seq_len] + [max_seq_len]
    available = max(0, core.arena.count_available_pages(cache.name))
    try:
        pages = {length: -(-cache.bytes_for(length) // core.arena.page_bytes) for length in lengths}
    except StrategyError:
        return {}
    return {str(length): available // needed for length, needed in pages.items() if needed}


# ---------------------------------------------------------------- requests
def describe_request(request: Request) -> dict[str, Any]:
    """Return where a request is and how far, without its text. What is not known yet is left out."""
    times, now = request.times, monotonic()
    description = {
        "id": request.key[1],
        "instance": request.cache.name,
        "reason": request.reason,
        "state": "waiting" if request.seat is None else "running",
        "priority": request.priority,
        "prompt_tokens": request.num_prompt_tokens,
        "computed_tokens": 0 if request.seat is None else request.seat.length,
        "cached_tokens": request.num_cached_tokens,
        "generated_tokens": request.num_output_tokens,
        "max_tokens": request.sampling.max_tokens,
        "preemptions": request.num_preemptions,
        "seconds": round(now - times.arrived, 1),
        "time_to_first_token": round(times.first_token - times.arrived, 4) if times.first_token else None,
    }
    return {name: value for name, value in description.items() if value is not None}
