"""`python -m tools.bench.tokenizing`: measures the time that the sandboxed tokenizer process adds to a request.

A chat is rendered and encoded, and a short prompt encoded, alternately in a separate process, as in the server, and in
this process. Prints the median of the paired differences.
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
from config.settings import load_settings
from config.sizes import parse_bytes
from server.models.files.directory import resolve_model_settings
from server.text.processes.messages import EncodeChat
from server.text.processes.sandbox import CallLimits, SandboxedTokenizer
from server.text.tokenizer import Tokenizer, TokenizerBase

WORDS_PER_MESSAGE = 24
TimedCall = Callable[[TokenizerBase], Awaitable[object]]


class TokenizingCost(NamedTuple):
    """The time of one request in microseconds, as medians of the rounds."""

    what: str
    in_process: float
    sandboxed: float
    difference: float  # sandboxed - in_process: median of the paired differences
    low: float  # ends of its 95 % confidence interval
    high: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.tokenizing", description=__doc__)
    parser.add_argument("--model", default="tiny", help="as for `kvmux serve` (default: the embedded one)")
    parser.add_argument("--messages", type=int, default=32, help="messages of the chat")
    parser.add_argument("--rounds", type=int, default=20, help="rounds, each in this process and in a separate one")
    parser.add_argument("--calls", type=int, default=100, help="calls of a round")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of sentences")
    options = parser.parse_args(arguments)
    if min(options.messages, options.calls) < 1 or options.rounds < 2:
        parser.error("--messages and --calls should be at least 1, --rounds at least 2")
    try:
        settings = resolve_model_settings(load_settings(None, {"model": options.model}))
        limits = CallLimits(settings.text_timeout, parse_bytes(settings.text_memory))
        in_process, sandboxed = (
            Tokenizer.from_directory(Path(settings.model)),
            SandboxedTokenizer(Path(settings.model), limits),
        )
    except SettingsError as error:
        sys.exit(str(error))
    costs = uvloop.run(measure(in_process, sandboxed, options.messages, options.rounds, options.calls))
    for cost in costs:
        print(json.dumps(cost._asdict()) if options.json else format_cost(cost))


async def measure(
    in_process: Tokenizer, sandboxed: SandboxedTokenizer, messages: int, rounds: int, calls: int
) -> Sequence[TokenizingCost]:
    """Measure a chat and a prompt; the first round of each is a warm-up."""
    async with sandboxed:
        return [
            await compare(what, work, in_process, sandboxed, rounds, calls)
            for what, work in (
                (f"a chat of {messages} messages", make_chat_work(messages)),
                ("a prompt of one sentence", lambda tokenizer: tokenizer.encode(make_sentence(random.Random(0)))),
            )
        ]


async def compare(
    what: str, work: TimedCall, in_process: TokenizerBase, sandboxed: TokenizerBase, rounds: int, calls: int
) -> TokenizingCost:
    times: dict[TokenizerBase, list[float]] = {in_process: [], sandboxed: []}
    for turn in range(rounds + 1):
        for tokenizer in (in_process, sandboxed) if turn % 2 else (sandboxed, in_process):
            microseconds = await time_calls(work, tokenizer, calls)
            if turn:
                times[tokenizer].append(microseconds)
    differences = [there - near for near, there in zip(times[in_process], times[sandboxed], strict=True)]
    low, high = compute_interval(differences)
    return TokenizingCost(what, median(times[in_process]), median(times[sandboxed]), median(differences), low, high)


async def time_calls(work: TimedCall, tokenizer: TokenizerBase, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        await work(tokenizer)
    return 1e6 * (time.perf_counter() - start) / calls


def compute_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by bootstrapping."""
    rng = random.Random(0)
    medians = [median(rng.choices(values, k=len(values))) for _ in range(1000)]
    edges = quantiles(medians, n=40)
    return edges[0], edges[-1]


def make_chat_work(messages: int) -> TimedCall:
    rng = random.Random(0)
    messages_to_encode = [
        {"role": ("user", "assistant")[i % 2], "content": make_sentence(rng)} for i in range(messages)
    ]
    return lambda tokenizer: tokenizer.encode_chat(EncodeChat([*messages_to_encode], max_length=2**21))


def make_sentence(rng: random.Random) -> str:
    letters = "etaoinshrdlu"
    return " ".join("".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(WORDS_PER_MESSAGE))


def format_cost(cost: TokenizingCost) -> str:
    return (
        f"{cost.what} takes {cost.in_process:,.0f} us in this process and {cost.sandboxed:,.0f} us in one of its own: "
        f"{cost.difference:+,.0f} us (95 % interval {cost.low:+,.0f} to {cost.high:+,.0f})"
    )


if __name__ == "__main__":
    main()
