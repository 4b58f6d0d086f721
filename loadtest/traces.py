"""`python -m loadtest.traces`: writes a synthetic trace of chat requests, as lines of JSON with times and token ids.

Conversations begin at random times. Each begins with one of a few system prompts, which are not equally frequent. Each
turn sends the whole conversation so far. The same seed gives the same trace. Token ids are random and belong to no
tokenizer's vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import NamedTuple

from config.quantities import parse_share_flag

VOCAB_SIZE = 32_000


class TracedRequest(NamedTuple):
    """A request of a trace: one turn of a conversation, with prompt and answer as token ids."""

    time: float  # seconds since the trace began
    conversation: int
    prompt: list[int]
    answer: list[int]


class Lognormal(NamedTuple):
    """A lognormal distribution, given by its median and by the standard deviation of the values' logarithms."""

    median: float
    spread: float  # standard deviation of the values' natural logarithms

    def draw(self, random: Random) -> float:
        return random.lognormvariate(math.log(self.median), self.spread)


class Workload(NamedTuple):
    """The distributions from which a trace is drawn.

    Turns: 2.5 per conversation on average, as in WildChat (Zhao et al. 2024: a million conversations, over 2.5 million
    turns); ShareGPT has 3.5. Pauses between turns: four of five are shorter than ten minutes, as Wang et al. 2025
    ("KVCache Cache in the Wild") report for the time until a block is reused in a consumer-facing service. (Without
    eviction, 62 % of that service's blocks were reused.) The other numbers are our estimates.
    """

    arrivals: float = 0.2  # conversations a second
    system_prompts: int = 20
    popularity: float = 1.0  # exponent of Zipf's law: the n-th system prompt has the weight n ** -popularity
    system_tokens: tuple[int, int] = (100, 1000)
    one_shot: float = 0.5  # share of the conversations that have one turn only
    further_turns: float = 3.0  # mean number of turns after the first one in conversations with several turns
    message: Lognormal = Lognormal(50, 1.3)  # tokens of a user's message: mostly a sentence or two, sometimes a page
    answer: Lognormal = Lognormal(250, 0.8)
    pause: Lognormal = Lognormal(120, 1.9)  # seconds in which the answer is read and the next message written
    tokens_per_second: float = 30.0  # generated tokens per second; decides how long an answer takes
    context: int = 8192  # maximum number of tokens of a conversation, which ends before a turn that would not fit


CHAT = Workload()


def generate_trace(seed: int, conversations: int, workload: Workload = CHAT) -> Iterator[TracedRequest]:
    """Yield the requests of `conversations` conversations in the order of their times."""
    random = Random(f"{seed}")
    prompts = [_draw_tokens(random, random.randint(*workload.system_tokens)) for _ in range(workload.system_prompts)]
    weights = list(accumulate((n + 1) ** -workload.popularity for n in range(workload.system_prompts)))
    starts = list(accumulate(random.expovariate(workload.arrivals) for _ in range(conversations)))
    turns = []
    for number, start in enumerate(starts):
        own_random = Random(f"{seed}/{number}")  # own seed: independent of how many conversations there are
        text = list(own_random.choices(prompts, cum_weights=weights)[0])
        turns += [
            (time, number, text, prompt_end, answer_end)
            for time, prompt_end, answer_end in _generate_turns(own_random, start, text, workload)
        ]
    for time, number, text, prompt_end, answer_end in sorted(turns, key=lambda turn: turn[:2]):
        yield TracedRequest(time, number, text[:prompt_end], text[prompt_end:answer_end])


def _generate_turns(
    random: Random, time: float, text: list[int], workload: Workload
) -> Iterator[tuple[float, int, int]]:
    """Append a conversation's turns to `text`; yield (time, end of the prompt, end of the answer) for each turn.

    The ends are indices of `text`, the tokens of the whole conversation; `time` is in seconds.
    """
    for _ in range(_draw_num_turns(random, workload)):
        message, answer = (1 + round(lengths.draw(random)) for lengths in (workload.message, workload.answer))
        prompt_end = len(text) + message
        if prompt_end + answer > workload.context:
            return
        text += _draw_tokens(random, message + answer)
        yield time, prompt_end, prompt_end + answer
        time += answer / workload.tokens_per_second + workload.pause.draw(random)


def _draw_num_turns(random: Random, workload: Workload) -> int:
    """Return a random number of turns: 1, or 1 plus a geometrically distributed number of further turns."""
    if random.random() < workload.one_shot:
        return 1
    turns = 2
    while random.random() > 1 / workload.further_turns:
        turns += 1
    return turns


def _draw_tokens(random: Random, tokens: int) -> list[int]:
    return random.choices(range(VOCAB_SIZE), k=tokens)


def format_line(request: TracedRequest) -> str:
    """Return a request as a line of JSON, for `kvmux bench --trace`."""
    return json.dumps(request._asdict(), separators=(",", ":"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.traces",
        description="Prints a synthetic trace of chat requests, one JSON object per line.",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers (default: 0)")
    parser.add_argument(
        "--conversations",
        type=int,
        default=1000,
        help="number of conversations in the trace (default: 1000, which begin within some 80 minutes)",
    )
    parser.add_argument(
        "--one-shot",
        type=parse_share_flag,
        default=CHAT.one_shot,
        help="share of conversations with one turn only, such as 25%% or 0.25 (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    for request in generate_trace(options.seed, options.conversations, CHAT._replace(one_shot=options.one_shot)):
        print(format_line(request))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # lets `| head` end the program without a traceback
    main()
