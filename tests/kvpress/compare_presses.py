"""Compares the keys that `compressed` keeps with the scorers `kvpress:NAME` with those that kvpress itself keeps.

Runs in kvpress's own environment. Argument: the file that record.py has written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from config.settings import StrategySettings
from kernels.reference.backend import ReferenceOps
from kernels.types import LayerSpec
from plugin_kit.driver.steps import step
from plugin_kit.driver.texts import RandomText
from plugin_kit.driver.world import World
from plugin_kit.scorers.texts import rotate
from tests.kvpress.run import Result, count, mask_of, print_results

HAVE_UNIT_VARIANCE = ("CompactorPress", "LeverageScorePress", "NonCausalAttnPress")  # their scores may be near to 0


def compare_presses(recorded: Mapping[str, Any]) -> Iterator[Result]:
    """Yield how far each press that was recorded and its scorer agree."""
    for name, options, record in recorded["presses"]:
        scores = record["scores"]  # [layers, H, S]
        L, H, S = scores.shape
        num_kept = record["kept"].shape[-1]
        kept = find_kept(f"kvpress:{name}", options, record, recorded["theta"])
        title = ", ".join([name.removesuffix("Press"), *(f"{option}={value}" for option, value in options.items())])
        unit = 1.0 if name in HAVE_UNIT_VARIANCE else 0.0
        theirs = mask_of(record["kept"], S)
        yield count(f"{title} {1 - num_kept / S:g}", f"{L} x {H}", mask_of(kept, S), theirs, scores, unit)


def find_kept(scorer: str, options: Mapping[str, Any], record: Mapping[str, Tensor], theta: float) -> Tensor:
    """Return the positions [layers, H, n] that `compressed` keeps of the recorded keys at a boundary after them."""
    keys, values, queries = (
        record[each].transpose(1, 2) for each in ("keys", "values", "queries")
    )  # [layers, S, H, D]
    L, S, H, D = keys.shape
    spec = LayerSpec(H, queries.shape[2], D, D, scale=D**-0.5)
    layers = [spec._replace(rotate=partial(rotate, rotated=D, theta=theta)) for _ in range(L)]
    settings = StrategySettings(
        kind="compressed",
        scorer=scorer,
        scorer_options=options,
        budget=record["kept"].shape[-1],
        every=S,
        sinks=0,
        recent=0,
    )
    sizes = {"layers": layers, "max_seats": 1, "max_seq_len": S + 1, "max_num_batched_tokens": S}
    world = World({"it": settings}, ReferenceOps(), **sizes)
    # one more token, which sees what was kept
    text = RandomText([*range(S + 1)], *([*torch.cat((x, x[:, :1]), dim=1)] for x in (queries, keys, values)))
    reading = world.open("it", text)
    step([(reading, S)])
    [kept] = step([(reading, 1)], keys=True).keys
    return torch.stack([positions[:-1].T for _, _, positions in kept])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(print_results(compare_presses(torch.load(sys.argv[1], weights_only=True))))
