"""Runs a single-stream workload with transformers; a process of its own that the rows of `make bench` start.

Greedy generation in bfloat16, from ids to ids, without HTTP or text. Prints results as `kvmux bench` does. Arguments:
the model's directory, the workload, and the number of answers after one to warm up.
"""

from __future__ import annotations

import json
import sys
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

from tools.bench.goals import TRANSFORMERS
from tools.bench.limits import WORKLOADS, Workload


class Latencies(NamedTuple):
    """The latencies of one answer, in milliseconds."""

    ttft_ms: float  # time to first token
    itl_ms: Sequence[float]  # inter-token latencies


class TimestampStreamer(BaseStreamer):
    """A streamer that records the times at which `generate` passes on the prompt and then each token."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: Tensor) -> None:
        self.seconds.append(perf_counter())

    def end(self) -> None:
        pass


def main() -> None:
    directory, workload, rounds = sys.argv[1:]
    print(json.dumps([measure(Path(directory), WORKLOADS[workload], int(rounds))]))


def measure(directory: Path, work: Workload, rounds: int) -> Mapping[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(model.config.vocab_size, (1, work.prompt_tokens), generator=generator) for _ in range(rounds + 1)
    ]
    _, *answers = [time_generation(model, prompt, work.answer_tokens) for prompt in prompts]
    return {
        "strategy": TRANSFORMERS,
        "phase": None,
        "requests": rounds,
        "prompt_tokens": rounds * work.prompt_tokens,
        "ttft_ms": {"p50": median(each.ttft_ms for each in answers)},
        "itl_ms": {"mean": fmean(gap for each in answers for gap in each.itl_ms)},
    }


def time_generation(model: Any, prompt: Tensor, tokens: int) -> Latencies:
    """Generate `tokens` tokens after a prompt [1, T] of ids; return the latencies."""
    arrivals, start = TimestampStreamer(), perf_counter()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
        streamer=arrivals,
    )
    _, *token_times = arrivals.seconds
    assert len(token_times) == tokens
    return Latencies(
        1e3 * (token_times[0] - start), [1e3 * (later - earlier) for earlier, later in pairwise(token_times)]
    )


if __name__ == "__main__":
    main()
