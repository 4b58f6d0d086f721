"""`python -m tools.bench.tokenizing`: what a process of its own costs a request before it reaches the engine.

An ordinary chat is rendered and encoded, and a short prompt encoded, by turns in a process of their own, as the server
does it, and in this one, as if the model's files were trusted. Prints the median of the rounds' differences.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import uvloop

from config.errors import SettingsError
from config.settings import load
from config.sizes import parse_bytes
from server.models.files.directory import located
from server.text.processes.messages import EncodeChat
from server.text.processes.sandbox import CallLimits, SandboxedTokenizer
from server.text.tokenizer import Tokenizer, TokenizerBase

WORDS = 24  # of a message
Work = Callable[[TokenizerBase], Awaitable[object]]


class Cost(NamedTuple):
    """Microseconds of one request, medians; `extra` of the paired rounds' differences, with its 95 % interval."""

    what: str
    here: float
    apart: float
    extra: float
    low: float
    high: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.tokenizing", description=__doc__)
    parser.add_argument("--model", default="tiny", help="as for `kvmux serve` (default: the embedded one)")
    parser.add_argument("--messages", type=int, default=32, help="of the chat")
    parser.add_argument("--rounds", type=int, default=20, help="each of --calls, here and in a process of their own")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of sentences")
    options = parser.parse_args(arguments)
    if min(options.messages, options.calls) < 1 or options.rounds < 2:
        parser.error("--messages and --calls: from 1 on; --rounds: from 2 on")
    try:
        settings = located(load(None, {"model": options.model}))
        limits = CallLimits(settings.text_timeout, parse_bytes(settings.text_memory))
        here, apart = Tokenizer.from_directory(Path(settings.model)), SandboxedTokenizer(Path(settings.model), limits)
    except SettingsError as error:
        sys.exit(str(error))
    costs = uvloop.run(measure(here, apart, options.messages, options.rounds, options.calls))
    for cost in costs:
        print(json.dumps(cost._asdict()) if options.json else in_words(cost))


async def measure(here: Tokenizer, apart: SandboxedTokenizer, messages: int, rounds: int, calls: int) -> Sequence[Cost]:
    """Measure a chat and a prompt. The first round of each warms up."""
    async with apart:
        return [
            await compare(what, work, here, apart, rounds, calls)
            for what, work in (
                (f"a chat of {messages} messages", chat_of(messages)),
                ("a prompt of one sentence", lambda tokenizer: tokenizer.encode(sentence(random.Random(0)))),
            )
        ]


async def compare(what: str, work: Work, here: TokenizerBase, apart: TokenizerBase, rounds: int, calls: int) -> Cost:
    times: dict[TokenizerBase, list[float]] = {here: [], apart: []}
    for turn in range(rounds + 1):
        for tokenizer in (here, apart) if turn % 2 else (apart, here):
            took = await timed(work, tokenizer, calls)
            if turn:
                times[tokenizer].append(took)
    extra = [there - near for near, there in zip(times[here], times[apart], strict=True)]
    low, high = interval(extra)
    return Cost(what, median(times[here]), median(times[apart]), median(extra), low, high)


async def timed(work: Work, tokenizer: TokenizerBase, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        await work(tokenizer)
    return 1e6 * (time.perf_counter() - began) / calls


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by resampling."""
    rng = random.Random(0)
    medians = [median(rng.choices(values, k=len(values))) for _ in range(1000)]
    edges = quantiles(medians, n=40)
    return edges[0], edges[-1]


def chat_of(messages: int) -> Work:
    rng = random.Random(0)
    said = [{"role": ("user", "assistant")[i % 2], "content": sentence(rng)} for i in range(messages)]
    return lambda tokenizer: tokenizer.encode_chat(EncodeChat([*said], longest=2**21))


def sentence(rng: random.Random) -> str:
    letters = "etaoinshrdlu"
    return " ".join("".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(WORDS))


def in_words(cost: Cost) -> str:
    return (
        f"{cost.what} takes {cost.here:,.0f} us in this process and {cost.apart:,.0f} us in one of its own: "
        f"{cost.extra:+,.0f} us (95 % interval {cost.low:+,.0f} to {cost.high:+,.0f})"
    )


if __name__ == "__main__":
    main()
