"""`python -m loadtest.traces`: writes a synthetic trace of chat requests, as lines of JSON with times and token ids.

Conversations arrive at random. Each has a system prompt, some of which are much more popular than others, and each of
its turns sends the whole conversation so far. The same seed gives the same trace. Token ids belong to no
vocabulary.
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

VOCAB_SIZE = 32_000


class TracedRequest(NamedTuple):
    """One turn of a conversation."""

    time: float  # seconds since the trace began
    conversation: int
    prompt: list[int]
    answer: list[int]


class Lognormal(NamedTuple):
    """A lognormal distribution: half of the values are below the median; with a larger spread more are far above."""

    median: float
    spread: float  # standard deviation of the logarithm

    def draw(self, random: Random) -> float:
        return random.lognormvariate(math.log(self.median), self.spread)


class Workload(NamedTuple):
    """The distributions that a trace is drawn from.

    Turns: 2.5 a conversation, as in WildChat (Zhao et al. 2024: a million conversations, over 2.5 million turns);
    ShareGPT has 3.5. Pauses: four of five are shorter than ten minutes, as Wang et al. 2025 ("KVCache Cache in the
    Wild") report of the reuses in a consumer-facing service; without any eviction 62 % of that service's blocks were
    found again. The other numbers are our guesses, rounded on purpose.
    """

    arrivals: float = 0.2  # conversations a second
    system_prompts: int = 20
    popularity: float = 1.0  # the n-th system prompt is chosen n ** -popularity as often as the first (Zipf)
    system_tokens: tuple[int, int] = (100, 1000)
    one_shot: float = 0.5  # share of the conversations that end with the first answer
    further_turns: float = 3.0  # mean number of turns after the first, of the other conversations
    message: Lognormal = Lognormal(50, 1.3)  # tokens: most are a sentence or two, some are a pasted page
    answer: Lognormal = Lognormal(250, 0.8)
    pause: Lognormal = Lognormal(120, 1.9)  # seconds in which the answer is read and the next message written
    tokens_per_second: float = 30.0  # tokens of an answer in a second
    context: int = 8192  # tokens; a conversation that would not fit ends


CHAT = Workload()


def generate_trace(seed: int, conversations: int, workload: Workload = CHAT) -> Iterator[TracedRequest]:
    """Yield all turns of a number of conversations, in the order of their times."""
    random = Random(f"{seed}")
    prompts = [_draw_tokens(random, random.randint(*workload.system_tokens)) for _ in range(workload.system_prompts)]
    weights = list(accumulate((n + 1) ** -workload.popularity for n in range(workload.system_prompts)))
    starts = list(accumulate(random.expovariate(workload.arrivals) for _ in range(conversations)))
    turns = []
    for number, start in enumerate(starts):
        own_random = Random(f"{seed}/{number}")  # so that a conversation does not depend on how many there are
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
    """Yield each turn's time, and the ends of its prompt and its answer in `text`, to which both are added."""
    for _ in range(_draw_num_turns(random, workload)):
        message, answer = (1 + round(lengths.draw(random)) for lengths in (workload.message, workload.answer))
        prompt_end = len(text) + message
        if prompt_end + answer > workload.context:
            return
        text += _draw_tokens(random, message + answer)
        yield time, prompt_end, prompt_end + answer
        time += answer / workload.tokens_per_second + workload.pause.draw(random)


def _draw_num_turns(random: Random, workload: Workload) -> int:
    """Return a random number of turns: 1, or 1 and a geometric number of further ones."""
    if random.random() < workload.one_shot:
        return 1
    turns = 2
    while random.random() > 1 / workload.further_turns:
        turns += 1
    return turns


def _draw_tokens(random: Random, tokens: int) -> list[int]:
    return random.choices(range(VOCAB_SIZE), k=tokens)


def format_line(request: TracedRequest) -> str:
    """Return a request as a line that `python -m cache_strategies.replay` reads."""
    return json.dumps(request._asdict(), separators=(",", ":"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.traces", description="Prints a synthetic trace of chat requests."
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers (default: 0)")
    parser.add_argument(
        "--conversations", type=int, default=1000, help="number of conversations (default: 1000, some 80 minutes)"
    )
    parser.add_argument(
        "--one-shot",
        type=float,
        default=CHAT.one_shot,
        help="share of conversations with one turn only (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    for request in generate_trace(options.seed, options.conversations, CHAT._replace(one_shot=options.one_shot)):
        print(format_line(request))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    main()
