"""`python -m tools.bench.transformers_peer`: runs a single-stream workload with transformers in this process.

Greedy generation in bfloat16, from ids to ids, without HTTP or text. Prints results as `kvmux bench` does. `make bench`
starts it as a separate process while no server runs.
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
from tools.bench.table.limits import WORKLOADS, Workload


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.transformers_peer", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a model directory in Hugging Face's format")
    parser.add_argument(
        "--workload", choices=[name for name, work in WORKLOADS.items() if work.streams == 1], default="a"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of answers, after one warm-up")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    options = parser.parse_args(arguments)
    if min(options.rounds, 1 if options.threads is None else options.threads) < 1:
        parser.error("--rounds and --threads should be at least 1")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print(json.dumps([measure(options.model, WORKLOADS[options.workload], options.rounds)]))


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
