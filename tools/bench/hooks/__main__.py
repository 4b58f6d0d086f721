"""`python -m tools.bench.hooks`: what a request whose strategy computes its own attention costs others in its batch.

Decodes a batch of sequences under `paged` and one more: under `contiguous`, whose addresses the kernels read, or under
`mirrored`, which computes all layers by its hook, in torch. Both batches take turns. The seconds that the hook itself
takes are subtracted; what is left of the step is compared with the step without a hook.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, MutableSequence, Sequence
from statistics import median
from typing import NamedTuple

import torch

from config.errors import SettingsError
from config.settings import load_settings
from server.engine.build import Engine, build_engine
from server.engine.core import Core
from server.engine.ipc.messages import SamplingParams, Submit, Tokens
from tools.compare_checkouts import compute_interval

WITHOUT_HOOK, WITH_HOOK = "contiguous", "mirrored"
LIMIT = 0.05  # largest share by which the rest of a step may be longer beside a hook
WORKER = 0
WARMUP_STEPS = 5


class HookTimer:
    """Implements CallObserver: adds up the seconds of the hook's calls. Its list of the running call is itself."""

    def __init__(self) -> None:
        self.hook = _RunningCall()
        self.running: MutableSequence[int] = self.hook

    def encode_methods(self, instance: str) -> Mapping[str, int]:
        return {"attend": 1} if instance == WITH_HOOK else {}


class _RunningCall(list[int]):
    """The number of the running call; a call of a hook has an odd number (see engine/calls.py)."""

    def __init__(self) -> None:
        super().__init__([0])
        self.seconds = 0.0
        self._since = 0.0

    def __setitem__(self, index: object, call: object) -> None:
        now = time.perf_counter()
        assert isinstance(call, int)
        if self[0] % 2:
            self.seconds += now - self._since
        super().__setitem__(0, call)
        self._since = now


class HookCost(NamedTuple):
    """The cost of a hook in a decode step, in milliseconds, as medians of the rounds."""

    sequences: int
    step: float  # without a hook
    step_with_hook: float
    hook: float  # of which the hook itself takes
    ratio: float  # of the rest of the step to a step without a hook
    ratio_interval: tuple[float, float]  # 95 %

    @property
    def is_within_limit(self) -> bool:
        return self.ratio <= 1 + LIMIT


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.hooks", description=__doc__)
    add = parser.add_argument
    add("--model", default="tiny", help="as for `kvmux serve` (default: the embedded one)")
    add("--threads", type=int, help="CPU threads (default: as `kvmux serve` chooses)")
    add("--sequences", type=int, default=8, help="number of sequences that are decoded together")
    add("--tokens", type=int, default=256, help="tokens of each prompt")
    add("--rounds", type=int, default=20, help="rounds, each with and without a hook")
    add("--steps", type=int, default=60, help="steps of a round")
    add("--json", action="store_true", help="print a JSON line instead of a sentence")
    options = parser.parse_args(arguments)
    timer = HookTimer()
    try:
        engine = build(options, timer)
    except SettingsError as error:
        parser.error(str(error))
    cost = measure(engine, timer, options.sequences, options.tokens, options.rounds, options.steps)
    print(json.dumps(cost._asdict()) if options.json else format_cost(cost))


def build(options: argparse.Namespace, timer: HookTimer) -> Engine:
    """Build an engine with the instances that are compared. Raises SettingsError."""
    flags = {
        "model": options.model,
        "threads": options.threads,
        "max_num_seqs": options.sequences,
        "max_seq_len": options.tokens + options.steps + options.sequences + 3 * WARMUP_STEPS,
        "strategies": {name: {"kind": name} for name in ("paged", WITHOUT_HOOK, WITH_HOOK)},
    }
    settings = load_settings(None, {name: value for name, value in flags.items() if value is not None})
    return build_engine(settings, calls=timer)


def measure(engine: Engine, timer: HookTimer, sequences: int, tokens: int, rounds: int, steps: int) -> HookCost:
    """Measure steps with and without a hook, alternately; the first round is a warm-up."""
    plain: list[float] = []
    hooked: list[float] = []
    hooks: list[float] = []
    engine.core.timing_interval = 0
    for i in range(rounds + 1):
        for name in (WITHOUT_HOOK, WITH_HOOK) if i % 2 else (WITH_HOOK, WITHOUT_HOOK):
            step, hook = measure_batch(engine.core, timer, ["paged"] * (sequences - 1) + [name], tokens, steps)
            if i:
                (hooked if name == WITH_HOOK else plain).append(1e3 * step)
                hooks += [1e3 * hook] if name == WITH_HOOK else []
    ratios = [(whole - part) / without for whole, part, without in zip(hooked, hooks, plain, strict=True)]
    return HookCost(sequences, median(plain), median(hooked), median(hooks), median(ratios), compute_interval(ratios))


def measure_batch(core: Core, timer: HookTimer, names: Sequence[str], tokens: int, steps: int) -> tuple[float, float]:
    """Decode a sequence under each of these instances; return the median seconds of a step, and of its hook."""
    for i, name in enumerate(names):
        prompt = torch.randint(core.model.info.vocab_size, (tokens,)).tolist()
        sampling = SamplingParams(max_tokens=steps + len(names) + 2 * WARMUP_STEPS, temperature=0.0, ignore_eos=True)
        error = core.submit(WORKER, Submit(str(i), prompt, sampling, name))
        assert error is None, error
    decoding: set[str] = set()
    while len(decoding) < len(names):
        decoding |= {event.message.request_id for event in core.step().events if isinstance(event.message, Tokens)}
    for _ in range(WARMUP_STEPS):
        core.step()
    seconds: list[tuple[float, float]] = []
    for _ in range(steps):
        timer.hook.seconds, start = 0.0, time.perf_counter()
        core.step()
        seconds.append((time.perf_counter() - start, timer.hook.seconds))
    core.cancel_worker(WORKER)
    whole, hook = zip(*seconds, strict=True)
    return median(whole), median(hook)


def format_cost(cost: HookCost) -> str:
    low, high = cost.ratio_interval
    verdict = "within" if cost.is_within_limit else "ABOVE"
    return (
        f"a step of {cost.sequences} sequences takes {cost.step:.3f} ms; with one hook {cost.step_with_hook:.3f} ms, "
        f"of which the hook takes {cost.hook:.3f} ms: the rest is {cost.ratio - 1:+.1%} "
        f"(95 %: {low - 1:+.1%} to {high - 1:+.1%}), {verdict} the limit of {LIMIT:+.0%}"
    )


if __name__ == "__main__":
    main()
