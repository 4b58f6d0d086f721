"""`python -m tools.bench.transformers_peer`: transformers in this process, at the work of one stream.

In bfloat16 and greedy, from ids to ids: neither HTTP nor text is in the way. Prints a result as `kvmux bench` does.
Knows nothing of servers; `make bench` starts it as a process of its own, between two of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from tools.bench.table.goals import TRANSFORMERS
from tools.bench.table.limits import WORKS, Work


class Times(NamedTuple):
    """Of one answer, in milliseconds."""

    first: float  # from the question to the first token
    gaps: Sequence[float]  # from token to token


class Arrivals(BaseStreamer):
    """When `generate` handed over what: the prompt, then token by token."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: Tensor) -> None:
        self.seconds.append(perf_counter())

    def end(self) -> None:
        pass


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.transformers_peer", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a directory as Hugging Face has them")
    parser.add_argument("--workload", choices=[name for name, work in WORKS.items() if work.streams == 1], default="a")
    parser.add_argument("--rounds", type=int, default=3, help="answers, after one that warms")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    options = parser.parse_args(arguments)
    if min(options.rounds, 1 if options.threads is None else options.threads) < 1:
        parser.error("--rounds and --threads: from 1 on")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print(json.dumps([result(options.model, WORKS[options.workload], options.rounds)]))


def result(directory: Path, work: Work, rounds: int) -> Mapping[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True)
    draws = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.config.vocab_size, (1, work.prompt), generator=draws) for _ in range(rounds + 1)]
    _, *answers = [answer(model, prompt, work.answer) for prompt in prompts]
    return {
        "strategy": TRANSFORMERS,
        "phase": None,
        "requests": rounds,
        "prompt_tokens": rounds * work.prompt,
        "ttft_ms": {"p50": median(each.first for each in answers)},
        "itl_ms": {"mean": fmean(gap for each in answers for gap in each.gaps)},
    }


def answer(model: Any, prompt: Tensor, tokens: int) -> Times:
    """prompt [1, T]."""
    arrivals, began = Arrivals(), perf_counter()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
        streamer=arrivals,
    )
    _, *came = arrivals.seconds
    assert len(came) == tokens
    return Times(1e3 * (came[0] - began), [1e3 * (later - earlier) for earlier, later in pairwise(came)])


if __name__ == "__main__":
    main()
