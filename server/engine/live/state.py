"""Describes what an engine holds and does at this moment, for GET /v1/live: blocks, instances and requests.

Everything in it changes while the server works; what is fixed or slow to compute is in info.py. Has no text of any
request. It is computed only for a client that watches.
"""

from __future__ import annotations

from collections import Counter
from time import monotonic, time
from typing import Any

from cache_strategies.types import BlockState
from server.engine.build import Engine
from server.engine.core import Core
from server.engine.info import describe_instance, describe_memory, drop_none
from server.engine.instance import Instance
from server.engine.instance_reports import read_blocks
from server.engine.live.blocks import describe_regions
from server.engine.scheduling.request import Request

MAX_LISTED_REQUESTS = 1000  # maximum number of requests in the list: the running ones first
SHORTEST_TEXT = 256  # tokens of the shortest text for which it is computed how many more fit


def describe_live(engine: Engine) -> dict[str, Any]:
    """Return the state of an engine, in objects that can be compared by key.

    docs/operations/administration.md describes them.
    """
    core = engine.core
    scheduler = core.scheduler
    listed = [*scheduler.running, *scheduler.waiting][:MAX_LISTED_REQUESTS]
    running = Counter(request.instance.name for request in scheduler.running)
    waiting = Counter(request.instance.name for request in scheduler.waiting)
    return {
        "object": "live",
        "created": round(time(), 3),
        "memory": describe_memory(core.memory)
        | {"free_bytes": core.memory.free_bytes, "weight_bytes": core.model.weight_bytes},
        "block_states": [state.name.lower() for state in BlockState],
        "regions": describe_regions(core),
        "instances": {
            each.name: {
                **describe_instance(core, each),
                "blocks": read_blocks(core.instances[each.name])._asdict(),
                "fits": count_fitting_texts(core, core.instances[each.name], engine.max_seq_len),
                "running": running[each.name],
                "waiting": waiting[each.name],
            }
            for each in engine.instances
        },
        "num_running": len(scheduler.running),
        "num_waiting": len(scheduler.waiting),
        "max_num_seqs": scheduler.limits.max_num_seqs,
        "requests": {f"{request.key[0]}/{request.key[1]}": describe_request(request) for request in listed},
    }


# ---------------------------------------------------------------- instances
def count_fitting_texts(core: Core, instance: Instance, max_seq_len: int) -> dict[str, int]:
    """Return how many more texts have room in an instance, by their number of tokens, where it says what they take.

    Idle memory counts as room. Texts that share their beginnings need less, so that more of them may fit.
    """
    lengths = [SHORTEST_TEXT << i for i in range(20) if SHORTEST_TEXT << i < max_seq_len] + [max_seq_len]
    available = max(0, core.memory.count_available_bytes(instance.name))
    sizes = {length: instance.estimate_bytes(length) for length in lengths}
    return {str(length): available // size for length, size in sizes.items() if size}


# ---------------------------------------------------------------- requests
def describe_request(request: Request) -> dict[str, Any]:
    """Return where a request is and how far, without its text. What is not known yet is left out."""
    times, now = request.times, monotonic()
    fields = {
        "id": request.key[1],
        "instance": request.instance.name,
        "reason": request.reason,
        "state": "waiting" if request.sequence is None else "running",
        "priority": request.priority,
        "prompt_tokens": request.num_prompt_tokens,
        "computed_tokens": request.num_computed_tokens,
        "cached_tokens": request.num_cached_tokens,
        "generated_tokens": request.num_output_tokens,
        "max_tokens": request.sampling.max_tokens,
        "preemptions": request.num_preemptions,
        "seconds": round(now - times.arrived, 1),
        "time_to_first_token": round(times.first_token - times.arrived, 4) if times.first_token else None,
    }
    return drop_none(fields)
