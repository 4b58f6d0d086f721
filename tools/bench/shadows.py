"""`python -m tools.bench.shadows`: what it costs to run a share of the requests under a candidate, too.

Serves the same kind of load in turns, in this process: a fixed number of requests at a time, each followed by another.
The instances of all turns are alike (`paged`). One has no roll-out; each of the others has one to the candidate, with
another share of shadows. The figures of a turn are divided by those of the turn without a roll-out in the same round.
HTTP is left out, so the ratios are larger than those that a client sees. Prompts are random and never repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console

from config.errors import SettingsError
from config.settings import load_settings
from server.engine.build import Engine, build_engine
from server.engine.ipc.messages import SamplingParams, Submit
from server.engine.rollouts.assignment import is_shadowed
from server.records import RequestRecord
from tools.bench.table.models import SHAPES, cache_folder, make_model
from tools.compare_checkouts import compute_interval

PLAIN = "plain"  # the instance without a roll-out
CANDIDATE = "candidate"
WORKER = 0
TABLE_HEAD = (
    "| shadow | tokens/s | of those without | 95 % | time to first token, p50 | of that without | 95 % |\n"
    "|---:|---:|---:|---:|---:|---:|---:|"
)


class TurnResult(NamedTuple):
    """The figures of one turn."""

    tokens_per_second: float
    first_token_ms: float  # median over the requests


class ShadowCost(NamedTuple):
    """The cost of one share of shadows: medians over the rounds, with 95 % intervals of the ratios."""

    share: str
    tokens_per_second: float
    speed_ratio: float
    speed_interval: tuple[float, float]
    first_token_ms: float
    first_token_ratio: float
    first_token_interval: tuple[float, float]
    shadowed: int  # number of requests that were shadowed, in all rounds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.shadows", description=__doc__)
    add = parser.add_argument
    add("--model", default="tiny", help=f"as for `kvmux serve`, or one of {', '.join(SHAPES)}")
    add("--candidate", default="int8", help="int8: paged with int8 keys and values; or a kind of strategy")
    add("--shares", nargs="+", default=["0%", "5%"], help="shares of shadowed requests to measure")
    add("--rounds", type=int, default=20, help="rounds, in each of which every share has a turn")
    add("--requests", type=int, default=40, help="requests of a turn")
    add("--streams", type=int, default=8, help="requests that are served at the same time")
    add("--tokens", type=int, default=128, help="tokens of each prompt")
    add("--generate", type=int, default=64, help="tokens of each answer")
    add("--kv-memory", default="1GiB", help="as for `kvmux serve`")
    add("--threads", type=int, help="CPU threads (default: as `kvmux serve` chooses)")
    add("--device", default="auto", help="as for `kvmux serve`")
    add("--json", action="store_true", help="print a JSON line for each share")
    options = parser.parse_args(arguments)
    try:
        engine = build(options)
    except SettingsError as error:
        parser.error(str(error))
    with Console(stderr=True).status("measuring") as status:
        costs = list(measure(engine, options, lambda text: status.update(text)))
    if not options.json:
        print(TABLE_HEAD)
    for cost in costs:
        print(json.dumps(cost._asdict()) if options.json else format_row(cost))
    return 0


def build(options: argparse.Namespace) -> Engine:
    """Build an engine with an instance for each share, and the candidate. Raises SettingsError."""
    if options.model in SHAPES:
        options.model = str(make_model(SHAPES[options.model], cache_folder(), print))
    names = {share: f"shadow-{share.rstrip('%').replace('.', '-')}" for share in options.shares}
    candidate = {"kind": "paged", "kv_dtype": "int8"} if options.candidate == "int8" else {"kind": options.candidate}
    forever = {"hold": 30 * 24 * 3600, "guard": dict.fromkeys(("kl_mean", "kl_p99", "top1"), "off")}
    flags: dict[str, Any] = {
        "model": options.model,
        "kv_memory": options.kv_memory,
        "threads": options.threads,
        "device": options.device,
        "max_num_seqs": options.streams + max(1, options.streams // 4),
        "max_seq_len": options.tokens + options.generate,
        "strategies": {CANDIDATE: candidate, **{name: {"kind": "paged"} for name in (PLAIN, *names.values())}},
        "rollouts": {
            name: {"from": name, "to": CANDIDATE, "shadow": share, **forever} for share, name in names.items()
        },
        "rollouts_file": "off",
    }
    return build_engine(load_settings(None, {name: value for name, value in flags.items() if value is not None}))


def measure(engine: Engine, options: argparse.Namespace, report: Any) -> Iterator[ShadowCost]:
    """Give the instance without a roll-out and those with one their turns, in another order in every second round."""
    rollouts = {rollout.settings.from_: rollout.settings for rollout in engine.rollouts.rollouts}
    names = [PLAIN, *rollouts]
    results: dict[str, list[TurnResult]] = {name: [] for name in names}
    shadowed = dict.fromkeys(names, 0)
    engine.core.timing_interval = 0
    draw = random.Random(options.rounds)
    for i in range(options.rounds + 1):
        for name in names if i % 2 else reversed(names):
            report(f"round {i} of {options.rounds}, {name}")
            share = rollouts[name].shadow_share if name in rollouts else 0.0
            ids = choose_ids(name, share, options.requests, draw)
            turn, compared = take_turn(engine, name, ids, options, draw)
            if i:  # the first round is a warm-up
                results[name].append(turn)
                shadowed[name] += compared
    for name, settings in rollouts.items():
        yield summarize(settings.shadow, results[PLAIN], results[name], shadowed[name])


def choose_ids(rollout: str, share: float, number: int, draw: random.Random) -> list[str]:
    """Return ids of requests of which exactly the share is shadowed, as by chance it would be in the mean."""
    wanted = [round(share * number), number - round(share * number)]  # shadowed, not shadowed
    found: tuple[list[str], list[str]] = ([], [])
    while any(len(ids) < n for ids, n in zip(found, wanted, strict=True)):
        request_id = f"{draw.randrange(2**60):x}"
        found[not is_shadowed(rollout, request_id, share)].append(request_id)
    ids = [*found[0][: wanted[0]], *found[1][: wanted[1]]]
    draw.shuffle(ids)
    return ids


def take_turn(
    engine: Engine, instance: str, ids: Sequence[str], options: argparse.Namespace, draw: random.Random
) -> tuple[TurnResult, int]:
    """Serve requests under an instance, and return its figures and how many were compared with the candidate."""
    core, vocabulary = engine.core, engine.core.model.info.vocab_size
    sampling = SamplingParams(max_tokens=options.generate, temperature=0.0, ignore_eos=True)
    prompts = {each: [draw.randrange(2, vocabulary) for _ in range(options.tokens)] for each in ids}
    waiting, records, compared = list(ids), list[RequestRecord](), 0
    began = time.perf_counter()
    while waiting or core.busy:
        while waiting and len(core.scheduler.running) + len(core.scheduler.waiting) < options.streams:
            request_id = waiting.pop()
            refused = core.submit(WORKER, Submit(request_id, prompts[request_id], sampling, kv_cache=instance))
            assert refused is None, refused
        result = core.step()
        records += result.finished
        compared += len(result.report.shadows)
    seconds = time.perf_counter() - began
    firsts = [record.first_token_seconds for record in records if record.first_token_seconds is not None]
    return TurnResult(len(ids) * options.generate / seconds, 1e3 * median(firsts)), compared


def summarize(share: str, plain: Sequence[TurnResult], turns: Sequence[TurnResult], shadowed: int) -> ShadowCost:
    """Return the medians over the rounds."""
    speeds = [ours.tokens_per_second / base.tokens_per_second for ours, base in zip(turns, plain, strict=True)]
    firsts = [ours.first_token_ms / base.first_token_ms for ours, base in zip(turns, plain, strict=True)]
    return ShadowCost(
        share,
        median(turn.tokens_per_second for turn in turns),
        median(speeds),
        compute_interval(speeds),
        median(turn.first_token_ms for turn in turns),
        median(firsts),
        compute_interval(firsts),
        shadowed,
    )


def format_row(cost: ShadowCost) -> str:
    """Return a row of the table."""
    speed, first = (f"{low:.3f} to {high:.3f}" for low, high in (cost.speed_interval, cost.first_token_interval))
    return (
        f"| {cost.share} | {cost.tokens_per_second:,.0f} | {cost.speed_ratio:.3f} | {speed} "
        f"| {cost.first_token_ms:.1f} ms | {cost.first_token_ratio:.3f} | {first} |"
    )


if __name__ == "__main__":
    sys.exit(main())
