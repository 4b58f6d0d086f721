"""`python -m tests.kvpress.run`: compares the keys that scorers keep with those that NVIDIA's kvpress keeps.

kvpress is installed into an environment of its own (.clients/kvpress), runs its presses on a small random Llama there
and records keys, values, queries, scores and kept positions. Here, the scorers get the same keys, values and queries. A
difference is explained if kvpress's own scores of the positions in question hardly differ from that of the last kept
one, as ties and rounding may then decide; any other difference fails the check. kvpress has no R-KV.

In that environment, which has what kvmux needs as well, `compressed` runs with the presses as scorers `kvpress:NAME`,
and what it keeps is compared. Then kvmux's own tests of `compressed` run there, and texts under every press.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cache_strategies.scorers import load_scorer
from cache_strategies.scorers.base import Past
from kernels.types import LayerSpec
from plugin_kit.scorers.texts import rotate
from tests.clients.run import environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = ("tests/cache_strategies/compressed", "tests/cache_strategies/scorers", "tests/kvpress/press_checks.py")
SINKS = {"streaming_llm": 4}  # first tokens that a press keeps and the scorer leaves to the strategy
OPTIONS: Mapping[str, dict[str, Any]] = {
    "expected_attention, mean only": {"use_covariance": False, "epsilon": 0.02},
}  # where they are not the default ones
ROUNDING = 1e-5  # relative to a score


class Result(NamedTuple):
    """How far the positions agree that a scorer and a press keep."""

    name: str
    heads: str
    kept: int  # positions that the press keeps, in all heads
    equal: int  # those of them that the scorer keeps, too
    unexplained: int  # differing positions that neither ties nor rounding explain

    def __str__(self) -> str:
        share = f"{100 * self.equal / self.kept:.3f} %"
        return f"| {self.name} | {self.heads} | {self.kept:,} | {share} | {self.unexplained} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kvpress.run", description=__doc__)
    parser.add_argument("--seed", type=int, help="seed of the model and its text (default: another one in each run)")
    seed = parser.parse_args(arguments).seed
    seed = random.randrange(1 << 32) if seed is None else seed
    print(f"seed {seed}", flush=True)
    run = partial(run_python, environment(HERE) / "bin/python")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.pt"
        if run("-m", "tests.kvpress.record", str(file), str(seed)):
            return 1
        recorded = torch.load(file, weights_only=True)
        turn = partial(rotate, theta=recorded["theta"])
        failed = print_results(chain.from_iterable(compare(*each, turn) for each in recorded["records"].items()))
        print("\nThe same presses as scorers:", flush=True)
        failed |= run("-m", "tests.kvpress.compare_presses", str(file)) != 0
    failed |= run("-m", "pytest", "-p", "no:cacheprovider", f"--seed={seed}", *TESTS) != 0
    return 1 if failed else 0


def run_python(python: Path, *arguments: str) -> int:
    """Run a program of this checkout in another environment; return its exit status."""
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([str(python), *arguments], cwd=ROOT, env=variables).returncode


def print_results(results: Iterable[Result]) -> bool:
    """Print a table; return whether there are differences that nothing explains."""
    print("| scorer, share dropped | layers x heads | kept | kept by both | unexplained |\n|---|---|---:|---:|---:|")
    failed = False
    for result in results:
        print(result, flush=True)
        failed |= result.unexplained > 0
    return failed


def compare(title: str, record: Mapping[str, Tensor], turn: Any) -> list[Result]:
    """Compare a scorer with a press; `title` is the record's name and the share that is dropped."""
    name, _, _ratio = title.rpartition(" ")
    pressed = record["scores"]  # [layers, H, S]
    L, H, S = pressed.shape
    num_kept = record["kept"].shape[-1]
    scores = torch.stack([score_layer(name, record, layer, turn) for layer in range(L)])
    scores[..., : SINKS.get(name, 0)] = torch.inf
    kept, heads = mask_of(scores.topk(num_kept).indices, S), f"{L} x {H}"
    if name != "h2o":
        return [count(title, heads, kept, mask_of(record["kept"], S), pressed)]
    # ObservedAttentionPress divides the sum of a key's weights by the number of queries that could see it
    sums = pressed * torch.arange(S, 0, -1)
    with_sums = count(f"{title}, sums", heads, kept, mask_of(sums.topk(num_kept).indices, S), sums)
    means = scores / torch.arange(S, 0, -1)
    kept_by_mean = mask_of(means.topk(num_kept).indices, S)
    return [with_sums, count(f"{title}, sums / queries", heads, kept_by_mean, mask_of(record["kept"], S), pressed)]


def score_layer(name: str, record: Mapping[str, Tensor], layer: int, turn: Any) -> Tensor:
    """Return the scores [H, S] of a scorer for what a press saw of a layer."""
    keys, values, queries = (record[each][layer] for each in ("keys", "values", "queries"))
    H, S, D = keys.shape
    cls = load_scorer(name.partition(",")[0])
    scorer = cls(cls.options_type(**OPTIONS.get(name, {})))
    spec = LayerSpec(H, len(queries), D, D, scale=D**-0.5, rotate=partial(turn, rotated=D))
    num_queries = S if scorer.num_queries is None else scorer.num_queries
    past = Past(
        layer,
        spec,
        length=S,
        num_new=S,
        positions=torch.arange(S).expand(H, S),
        load_keys=lambda: keys.transpose(0, 1),
        load_values=lambda: values.transpose(0, 1),
        queries=queries.transpose(0, 1)[S - num_queries :],
    )
    return scorer.score(past).clone()


def mask_of(positions: Tensor, S: int) -> Tensor:
    """Return positions [layers, H, n] as a mask [layers, H, S]."""
    return torch.zeros(*positions.shape[:2], S, dtype=torch.bool).scatter_(2, positions, True)


def count(name: str, heads: str, ours: Tensor, theirs: Tensor, pressed: Tensor, unit: float = 0.0) -> Result:
    """Count the positions that both masks [layers, H, S] have, and the differences that `pressed` does not explain.

    `unit` is how large scores are that the press has computed as differences of larger ones.
    """
    threshold = pressed.masked_fill(~theirs, torch.inf).amin(dim=-1, keepdim=True)
    is_tie = (pressed - threshold).abs() <= ROUNDING * threshold.abs().clamp_min(unit)
    unexplained = (ours ^ theirs) & ~is_tie
    return Result(name, heads, int(theirs.sum()), int((ours & theirs).sum()), int(unexplained.sum()))


if __name__ == "__main__":
    sys.exit(main())
