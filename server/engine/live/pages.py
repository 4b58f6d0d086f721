"""Describes the pages of the KV memory: all of them in short, for the live state, or one of them in detail."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_strategies.arena import FREE, UNTOUCHED
from cache_strategies.types import PageState
from server.engine.core import Core
from server.engine.info import drop_none, round_seconds
from server.engine.scheduling.request import RequestError

MAX_CELLS = 2**14  # maximum number of cells in the grid of pages: beyond it, each cell stands for several pages


def describe_cells(core: Core) -> dict[str, Any]:
    """Return the pages of the arena: the owner and the state of each, or of every n-th if there are many.

    `owners` and `states` are bytes in base64, one for each cell: the number of the owner in `instances`, from 1 on, or
    0 if there is none; and a number in `state_names`.
    """
    marks, names = core.arena.mark_owners()
    states = read_states(core, marks, names)
    step = -(-len(marks) // MAX_CELLS)
    marks[marks == UNTOUCHED] = FREE
    return {
        "pages_per_cell": step,
        "instances": [name for _, name in sorted(names.items())],
        "state_names": [state.name.lower() for state in PageState],
        "owners": encode_bytes(marks[::step]),
        "states": encode_bytes(states[::step]),
    }


def describe_page(core: Core, page: int) -> dict[str, Any]:
    """Return the owner and the state of a page, and what its owner knows about it. What is not known is left out.

    Raises RequestError if there is no such page.
    """
    if not 0 <= page < core.arena.pages:
        message = f"there is no page {page}: the KV memory has the pages 0 to {core.arena.pages - 1}"
        raise RequestError(404, message, code="not_found")
    marks, names = core.arena.mark_owners()
    mark = int(marks[page])
    owner = names.get(mark)
    states = read_states(core, marks, {} if owner is None else {mark: owner})
    instance = None if owner is None else core.instances.get(owner)
    info = None if instance is None else instance.describe_page(page)
    description: dict[str, Any] = {"page": page, "owner": owner, "state": PageState(states[page]).name.lower()}
    if info is not None:
        description |= {
            "first_token": info.first_token,
            "tokens": info.num_tokens,
            "references": info.references,
            "num_pins": info.num_pins,
            "age_seconds": round_seconds(info.age),
            "idle_seconds": round_seconds(info.idle),
            "prefix": info.prefix,
        }
    return drop_none(description)


def read_states(core: Core, marks: NDArray[np.uint8], names: Mapping[int, str]) -> NDArray[np.uint8]:
    """Return the `PageState` of each page, uint8; `marks` [pages] are the owners. Only those in `names` are asked."""
    states = np.full(len(marks), PageState.IN_USE, np.uint8)
    states[marks == FREE], states[marks == UNTOUCHED] = PageState.FREE, PageState.UNTOUCHED
    for mark, name in names.items():
        if (instance := core.instances.get(name)) is not None:
            own = marks == mark
            states[own] = instance.read_page_states(len(marks)).numpy()[own]
    return states


def encode_bytes(values: NDArray[np.uint8]) -> str:
    """Return bytes in base64, as the cells of the live state have them."""
    return base64.b64encode(values.tobytes()).decode()
