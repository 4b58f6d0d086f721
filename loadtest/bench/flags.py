"""The flags of `kvmux bench`. Imports only the standard library, so that `--help` prints without delay."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.flags import COUNT, DURATION, FILE, SWITCH, Kind, add_flags, flag, number_flag

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
WORKLOAD_NAMES = ("a", "b", "c8", "c16", "d", "e1", "e8", "e16", "f", "g")


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


_JSON = Kind("JSON", _json_object)
_NATURAL = Kind("N", number_flag(int, "a whole number, 0 or more", lambda number: number >= 0))
_POSITIVE = Kind("X", number_flag(float, "a number above 0", lambda number: 0 < number < math.inf))


@dataclass(frozen=True)
class _ServerOptions:
    url: str = flag(URL, Kind("URL"), "address of the server")
    model: str = flag("", Kind("NAME"), "name of the model to measure (default: the first that the server lists)")
    strategies: Sequence[str] = flag(
        (), Kind("NAME"), "strategies to measure (default: all that the server lists)", nargs="+"
    )
    mixed: bool = flag(False, SWITCH, "add a row to the report for requests that are distributed among all strategies")
    api_key: str = flag("", Kind("KEY"), "API key to send as a bearer token (default: $OPENAI_API_KEY)", repr=False)
    body: Mapping[str, Any] | None = flag(
        None, _JSON, "JSON object with fields to add to every request; null removes a field"
    )


@dataclass(frozen=True)
class _LoadOptions:
    workload: Sequence[str] = flag(
        (),
        Kind("NAME"),
        "workloads to run, of those listed below (default: a b c8 d)",
        nargs="+",
        choices=WORKLOAD_NAMES,
    )
    concurrency: int | None = flag(
        None, COUNT, "number of clients, each of which sends one request at a time", exclusive=True
    )
    rate: float | None = flag(
        None, _POSITIVE, "mean number of requests a second, sent at random times (Poisson)", exclusive=True
    )
    burst: int | None = flag(
        None, COUNT, "number of requests in a burst; --every is the time from one to the next", exclusive=True
    )
    trace: Path | None = flag(
        None, FILE, "file of requests and their times, as `python -m loadtest.traces` writes it", exclusive=True
    )
    every: float = flag(5.0, DURATION, "time between the bursts of --burst, in seconds or as 500ms or 1m")
    speed_up: float = flag(1.0, _POSITIVE, "factor by which a trace is sent faster than recorded")
    requests: int | None = flag(None, COUNT, "number of requests per strategy and round; with --trace: its first N")
    rounds: int | None = flag(None, COUNT, "number of rounds of each workload (default: 3; 1 for a trace)")
    prompt_tokens: int | None = flag(None, COUNT, "number of random tokens of each prompt, different in every prompt")
    shared_tokens: int | None = flag(
        None, _NATURAL, "number of tokens with which all prompts of a round begin, before those of --prompt-tokens"
    )
    max_tokens: int | None = flag(None, COUNT, "number of tokens of each answer")
    seed: int | None = flag(
        None, _NATURAL, "seed of the random prompts (default: a new one each time, so that no cache has the prompts)"
    )
    warm_up: bool = flag(
        True,
        SWITCH,
        "send a few requests that are not measured first (the default); without them, a server that has run the "
        "same workload with the same --seed finds all its prompts cached",
    )


@dataclass(frozen=True)
class _ReportOptions:
    json: Path | None = flag(
        None,
        FILE,
        "file to which all figures are written as JSON; -: write them to standard output, instead of the table",
    )


@dataclass(frozen=True)
class BenchOptions(_ReportOptions, _LoadOptions, _ServerOptions):
    """The options of a benchmark. A length, arrival or number of requests that is None is the workload's."""


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every option."""
    add_flags(parser, "server", _ServerOptions)
    add_flags(parser, "load", _LoadOptions)
    add_flags(parser, "report", _ReportOptions)
