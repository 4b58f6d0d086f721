"""Four tasks of SCBench whose contexts are generated: several questions about one context, in two ways of asking.

After Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods" (arXiv:2412.10319), and
https://github.com/microsoft/MInference/tree/main/scbench (MIT): Retr.KV, Retr.Prefix-Suffix, Retr.MultiHop and
Math.Find, with its scores; the code is our own. SCBench's contexts are files of about 100,000 tokens, and of prompts
only Retr.KV's is in its code; ours are drawn anew for any length, and the wording of the other prompts is ours. As
there, a later turn of a conversation follows the right answers to the earlier ones. `scbench_X` asks in turns,
`scbench_X_requests` in requests that share the context.
"""

from __future__ import annotations

import json
from random import Random
from statistics import median
from string import ascii_lowercase, digits

from server.evaluation.suites.ruler import draw_chain, draw_uuid, write_chains
from server.evaluation.suites.task import Asking, SuiteTask, TaskSample, Turn, match_all, match_first_number

TURNS = 3  # questions about a context
AFFIX = 4  # letters of a prefix or suffix
HOPS = 2  # of each chain
MAX_NUMBER = 100_000


def draw_pairs(rng: Random, size: int, length: int) -> TaskSample:
    """Return a JSON object of `size` random keys and values."""
    pairs = {draw_uuid(rng): draw_uuid(rng) for _ in range(size)}
    turns = [
        Turn(f'\nKey: "{key}"\nThe value associated with the specified key is:', [pairs[key]])
        for key in rng.sample([*pairs], TURNS)
    ]
    intro = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    return TaskSample(f"{intro}{json.dumps(pairs)}\n", turns, max_tokens=64)


def draw_strings(rng: Random, size: int, length: int) -> TaskSample:
    """Return a list of `size` random strings, no two of which have the same beginning and end."""
    strings: dict[tuple[str, str], str] = {}
    while len(strings) < size:
        text = "".join(rng.choices(ascii_lowercase + digits, k=rng.randint(10, 20)))
        strings[text[:AFFIX], text[-AFFIX:]] = text
    turns = [
        Turn(f'\nWhich string of the list begins with "{prefix}" and ends with "{suffix}"? Repeat it.', [text])
        for (prefix, suffix), text in rng.sample([*strings.items()], TURNS)
    ]
    return TaskSample("Memorize the following list of strings.\n\n" + "\n".join(strings.values()), turns, max_tokens=48)


def draw_chains(rng: Random, size: int, length: int) -> TaskSample:
    """Return three chains of three variables in noise."""
    taken = set[str]()
    chains = [draw_chain(rng, HOPS, 5, taken) for _ in range(TURNS)]
    intro = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    turns = [
        Turn(f"\nFind all variables that are assigned the value {value} in the text above, directly or not.", names)
        for value, names in chains
    ]
    return TaskSample(intro + write_chains(rng, size, chains), turns, max_tokens=64)


def draw_numbers(rng: Random, size: int, length: int) -> TaskSample:
    """Return a list of `size` different numbers, or of one more, so that there is one in the middle."""
    numbers = rng.sample(range(1, MAX_NUMBER), size | 1)
    ascending = sorted(numbers)
    places = {"largest": -1, "smallest": 0, "second largest": -2, "second smallest": 1}
    right = {name: ascending[place] for name, place in places.items()} | {"median": median(numbers)}
    turns = [
        Turn(f"\nWhat is the {name} number of the list? Answer with only one number, no other words.", [str(number)])
        for name, number in rng.sample([*right.items()], TURNS)
    ]
    return TaskSample(f"Below is a list of numbers, about which I will ask you.\n\n{numbers}\n", turns, max_tokens=12)


_DRAWN = {
    "kv": (draw_pairs, match_all, 5),
    "prefix_suffix": (draw_strings, match_all, 5),
    "vt": (draw_chains, match_all, 5),
    "mf": (draw_numbers, match_first_number, 9),
}
SCBENCH = tuple(
    SuiteTask(f"scbench_{name}{end}", draw, score, least, asking=asking)
    for name, (draw, score, least) in _DRAWN.items()
    for end, asking in (("", Asking.TURNS), ("_requests", Asking.REQUESTS))
)
