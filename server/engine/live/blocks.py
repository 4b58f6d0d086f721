"""Describes the blocks of the KV memory by region: all of them in short, for the live state, or one in detail."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_strategies.memory import Region
from cache_strategies.types import BlockState
from server.engine.core import Core
from server.engine.info import drop_none, round_seconds
from server.engine.instance import Instance
from server.engine.instance_reports import find_block_info, read_block_states
from server.engine.scheduling.request import RequestError

MAX_CELLS = 2**14  # maximum number of cells of a region: if it has more blocks, each cell stands for several


def describe_regions(core: Core) -> dict[str, Any]:
    """Return the regions of all instances, by instance and number, such as "NAME/0"."""
    return {
        f"{name}/{number}": _describe_region(instance, region)
        for name, instance in core.instances.items()
        for number, region in enumerate(core.memory.list_regions(name))
    }


def _describe_region(instance: Instance, region: Region) -> dict[str, Any]:
    """Return a region with the state of each of its blocks, or of every n-th if there are many.

    `states` are bytes in base64, one for each cell: a number in `block_states` of the live state.
    """
    states = _mark_by_block(instance, region).max(axis=1)
    step = max(1, -(-len(states) // MAX_CELLS))
    return {
        "instance": instance.name,
        "what": region.what,
        "block_bytes": region.size,
        "held_blocks": region.num_held,
        "blocks_per_cell": step,
        "states": encode_bytes(states[::step]),
    }


def describe_block(core: Core, name: str, region_number: int, block: int) -> dict[str, Any]:
    """Return the state of a block, and what its instance knows about it. What is not known is left out.

    Raises RequestError if there is no such block.
    """
    instance = core.instances.get(name)
    if instance is None:
        raise RequestError(404, f"there is no cache strategy {name!r}", code="not_found")
    regions = core.memory.list_regions(name)
    if not 0 <= region_number < len(regions):
        message = f"there is no region {region_number}: strategy {name!r} has {len(regions)} regions"
        raise RequestError(404, message, code="not_found")
    region = regions[region_number]
    marks = _mark_by_block(instance, region)
    if not 0 <= block < len(marks):
        message = f"there is no block {block}: region {region_number} of strategy {name!r} has {len(marks)} blocks"
        raise RequestError(404, message, code="not_found")
    state, first_page = marks[block].max(), block * marks.shape[1] + int(marks[block].argmax())
    info = None if state == BlockState.FREE else find_block_info(instance, region, first_page)
    description: dict[str, Any] = {
        "instance": name,
        "region": region_number,
        "block": block,
        "state": BlockState(state).name.lower(),
    }
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


def _mark_by_block(instance: Instance, region: Region) -> NDArray[np.uint8]:
    """Return the states of a region's pages in rows [blocks, pages of a block], of which at most one is not FREE.

    Blocks are numbered here by the row in which they begin. A region that shares its pages with others may have blocks
    that begin at any page, but never two in a row, as a block is as long as a row.
    """
    states = read_block_states(instance, region).numpy()
    pages = region.size // region.page_bytes
    return np.pad(states, (0, -len(states) % pages)).reshape(-1, pages)


def encode_bytes(values: NDArray[np.uint8]) -> str:
    """Return bytes in base64, as the live state has them."""
    return base64.b64encode(values.tobytes()).decode()
