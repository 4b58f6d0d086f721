"""Compares the keys that the scorers `kvpress:NAME` keep with those that kvpress itself keeps.

Runs in kvpress's own environment. Argument: the file that record.py has written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from plugin_kit.scorers.texts import rotate
from tests.kvpress.run import Result, count, mask_of, print_results, score_layers


def compare_presses(recorded: dict[str, Any]) -> Iterator[Result]:
    """Yield how far each press that was recorded and its scorer agree."""
    turn = partial(rotate, theta=recorded["theta"])
    for name, options, record in recorded["presses"]:
        L, H, S = record["scores"].shape
        num_kept = record["kept"].shape[-1]
        scores = score_layers(f"kvpress:{name}", options, record, turn)
        kept = mask_of(scores.topk(num_kept).indices, S)
        title = ", ".join([name.removesuffix("Press"), *(f"{option}={value}" for option, value in options.items())])
        yield count(f"{title} {1 - num_kept / S:g}", f"{L} x {H}", kept, mask_of(record["kept"], S), record["scores"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(print_results(compare_presses(torch.load(sys.argv[1], weights_only=True))))
