"""The flags of `kvmux bench`. Imports only the standard library, so that `--help` prints without delay."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config.quantities import number_flag, parse_count_flag, parse_duration_flag

DESCRIPTION = """\
Benchmarks a running server over HTTP, under each of its cache strategies in turn. Reports for every workload the time
to the first token (TTFT), between tokens (ITL) and to the end, tokens a second, and how much of the prompts was found
in a cache. Works with any server that has OpenAI's /v1/completions; a server without strategies gets a row for its
model."""

EPILOG = """\
workloads:
  a     1 stream, 128 tokens in, 128 out
  b     1 stream, 2,048 tokens in, 64 out
  c8    8 at once, 256 tokens in, 128 out
  c16   16 at once, 256 tokens in, 128 out
  d     8 at once, 1,024 shared + 64 tokens in, 64 out
        cold, then warm: with the shared tokens in the cache
  e1    1 stream, 16,384 tokens in, 64 out
  e8    8 at once, 4,096 tokens in, 64 out
  e16   16 at once, 4,096 tokens in, 160 out
  f     1 stream, 8,192 shared + 256 tokens in, 8 out
        cold, then warm: with the shared tokens in the cache
  g     128 at once, 512 tokens in, 64 out

Prompts are random token ids, new in each round and the same for every strategy; answers are greedy and of full length.
Prompts that do not fit into the model's context are shortened, and the report says so. Strategies take turns within a
round, so that other load on the machine affects all of them. Flags of lengths and arrivals change the named workloads;
without a name they change c8 (reported as "own"). The exit code is 1 if a request failed.

examples:
  kvmux bench
  kvmux bench --workload c8 c16 --strategies paged contiguous --json report.json
  kvmux bench --rate 4 --requests 64 --prompt-tokens 512 --max-tokens 64
  kvmux bench --burst 16 --every 10
  python -m loadtest.traces --conversations 50 > chats.jsonl; kvmux bench --trace chats.jsonl --speed-up 10
  kvmux bench --url http://127.0.0.1:8080 --workload a c8          # llama.cpp, vLLM, ...
"""

URL = "http://127.0.0.1:8000"
_non_negative_int = number_flag(int, "a whole number, 0 or more", lambda number: number >= 0)
_positive_float = number_flag(float, "a number above 0", lambda number: 0 < number < math.inf)
WORKLOAD_NAMES = ("a", "b", "c8", "c16", "d", "e1", "e8", "e16", "f", "g")


@dataclass(frozen=True)
class BenchOptions:
    """The options of a benchmark. A length, arrival or number of requests that is None is the workload's."""

    url: str = URL
    model: str = ""
    api_key: str = field(default="", repr=False)
    strategies: Sequence[str] = ()
    mixed: bool = False
    workload: Sequence[str] = ()
    concurrency: int | None = None
    rate: float | None = None
    burst: int | None = None
    every: float = 5.0
    trace: Path | None = None
    speed_up: float = 1.0
    requests: int | None = None
    rounds: int | None = None
    prompt_tokens: int | None = None
    shared_tokens: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    warm_up: bool = True
    body: Mapping[str, Any] = field(default_factory=dict)
    json: Path | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of BenchOptions."""
    _add_server(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load"))
    add = parser.add_argument_group("report").add_argument
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="file to which all figures are written as JSON; -: write them to standard output, instead of the table",
    )


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--url", metavar="URL", help=f"address of the server (default: {URL})")
    add("--model", metavar="NAME", help="name of the model to measure (default: the first that the server lists)")
    add("--strategies", nargs="+", metavar="NAME", help="strategies to measure (default: all that the server lists)")
    add(
        "--mixed",
        action="store_true",
        help="add a row to the report for requests that are distributed among all strategies",
    )
    add("--api-key", metavar="KEY", help="API key to send as a bearer token (default: $OPENAI_API_KEY)")
    add(
        "--body",
        type=_json_object,
        metavar="JSON",
        help="JSON object with fields to add to every request; null removes a field",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--workload",
        nargs="+",
        choices=WORKLOAD_NAMES,
        metavar="NAME",
        help="workloads to run, of those listed below (default: a b c8 d)",
    )
    _add_arrivals(group)
    add(
        "--requests",
        type=parse_count_flag,
        metavar="N",
        help="number of requests per strategy and round; with --trace: its first N",
    )
    add(
        "--rounds",
        type=parse_count_flag,
        metavar="N",
        help="number of rounds of each workload (default: 3; 1 for a trace)",
    )
    add(
        "--prompt-tokens",
        type=parse_count_flag,
        metavar="N",
        help="number of random tokens of each prompt, different in every prompt",
    )
    add(
        "--shared-tokens",
        type=_non_negative_int,
        metavar="N",
        help="number of tokens with which all prompts of a round begin, before those of --prompt-tokens",
    )
    add("--max-tokens", type=parse_count_flag, metavar="N", help="number of tokens of each answer")
    add(
        "--seed",
        type=_non_negative_int,
        metavar="N",
        help="seed of the random prompts (default: a new one each time, so that no cache has the prompts)",
    )
    add(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        help="send a few requests that are not measured first (the default); without them, a server that has run the "
        "same workload with the same --seed finds all its prompts cached",
    )


def _add_arrivals(group: argparse._ArgumentGroup) -> None:
    """Add the flags that say when requests are sent."""
    arrivals = group.add_mutually_exclusive_group().add_argument
    arrivals(
        "--concurrency",
        type=parse_count_flag,
        metavar="N",
        help="number of clients, each of which sends one request at a time",
    )
    arrivals(
        "--rate",
        type=_positive_float,
        metavar="X",
        help="mean number of requests a second, sent at random times (Poisson)",
    )
    arrivals(
        "--burst",
        type=parse_count_flag,
        metavar="N",
        help="number of requests in a burst; --every is the time from one to the next",
    )
    arrivals(
        "--trace",
        type=Path,
        metavar="FILE",
        help="file of requests and their times, as `python -m loadtest.traces` writes it",
    )
    group.add_argument(
        "--every",
        type=parse_duration_flag,
        metavar="DURATION",
        help=f"time between the bursts of --burst, in seconds or as 500ms or 1m (default: {BenchOptions.every:g})",
    )
    group.add_argument(
        "--speed-up",
        type=_positive_float,
        metavar="X",
        help="factor by which a trace is sent faster than recorded (default: 1)",
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        # raises ValueError for NaN, infinity and text that UTF-8 cannot encode, which cannot be sent
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object, such as '{{\"priority\": 1}}'")
    return value
