"""`python -m server.bench_step`: where the time of a decode step goes, operation by operation.

Drives the engine without HTTP. What is left besides the operations is Python and small tensors: scheduling, laying out
the batch, sampling.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch

from config.settings import SettingsError, Weights, load
from kernels.stopwatch import Stopwatch
from server.engine.build import Engine, build_engine
from server.engine.messages import Sampling, Submit, Tokens

STEPS = 50
WARM = 5
MOVERS = ("linear", "quantised_linear", "attend")  # operations that read what is large: weights, keys and values
REST = "everything else"
WORKER = 0


class Share(NamedTuple):
    """What a step spends on something."""

    sequences: int
    what: str  # an operation, or REST
    milliseconds: float  # of a step, on average
    share: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m server.bench_step", description=__doc__)
    parser.add_argument("--model", default="tiny", help="as for `kvmux serve` (default: the embedded one)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--weights", default="auto", choices=get_args(Weights), help="as for `kvmux serve`")
    parser.add_argument("--threads", type=int, help="CPU threads (default: as `kvmux serve` chooses)")
    parser.add_argument("--kv-cache", default="paged", help="strategy of all sequences")
    parser.add_argument("--sequences", type=int, nargs="+", default=(1, 8), help="decoded together")
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache of each")
    parser.add_argument("--json", action="store_true", help="one JSON line a figure instead of a table")
    options = parser.parse_args(arguments)
    try:
        flags = {name: getattr(options, name) for name in ("model", "dtype", "weights", "threads")}
        engine = build_engine(load(None, flags | {"max_num_seqs": max(4, *options.sequences)}))
    except SettingsError as error:
        parser.error(str(error))
    if options.kv_cache not in engine.core.caches:
        parser.error(f"--kv-cache: there are {', '.join(engine.core.caches)}")
    if options.context + WARM + STEPS > engine.max_seq_len or min(options.context, *options.sequences) < 1:
        parser.error(f"--context: from 1 to {engine.max_seq_len - WARM - STEPS}; --sequences: from 1 on")
    for sequences in options.sequences:
        shares = measure(engine, options.kv_cache, sequences, options.context)
        print("\n".join(json.dumps(s._asdict()) for s in shares) if options.json else table(shares))


def measure(engine: Engine, kv_cache: str, sequences: int, context: int) -> list[Share]:
    """STEPS steps of so many greedy sequences, all past their prompts."""
    core = engine.core
    sampling = Sampling(max_tokens=engine.max_seq_len - context, temperature=0.0, ignore_eos=True)
    for i in range(sequences):
        prompt = torch.randint(core.model.facts.vocab_size, (context,)).tolist()
        refused = core.submit(WORKER, Submit(str(i), prompt, sampling, kv_cache))
        assert refused is None, refused
    decoding: set[str] = set()
    while len(decoding) < sequences:
        decoding |= {event.message.request_id for event in core.step().events if isinstance(event.message, Tokens)}
    for _ in range(WARM):
        core.step()
    with Stopwatch(engine.kernels.ops, core.model.device) as watch:
        began = time.perf_counter()
        for _ in range(STEPS):
            core.step()
        total = time.perf_counter() - began
    core.cancel_worker(WORKER)
    spent = watch.seconds | {REST: total - sum(watch.seconds.values())}
    return [Share(sequences, what, 1e3 * took / STEPS, took / total) for what, took in spent.items()]


def table(shares: Sequence[Share]) -> str:
    """Markdown."""
    many = shares[0].sequences
    lines = [f"| {many} sequence{'s' if many > 1 else ''} | ms a step | share |", "|---|---:|---:|"]
    lines += [f"| {s.what} | {s.milliseconds:.2f} | {s.share:.1%} |" for s in shares if s.milliseconds]
    total = sum(s.milliseconds for s in shares)
    other = sum(s.milliseconds for s in shares if s.what not in MOVERS)
    lines.append(f"| outside {' and '.join(MOVERS)} | {other:.2f} of {total:.2f} | {other / total:.1%} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
