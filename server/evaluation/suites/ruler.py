"""The six tasks of RULER that need no data: needles, variable tracking, common and frequent words.

After Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (arXiv:2404.06654), and
https://github.com/NVIDIA/RULER (Apache-2.0): the prompts, counts and scores are those of scripts/data/synthetic and
scripts/synthetic.yaml; the code is our own. What differs: words come from kvmux's stories, not from wonderwords; keys
of one text differ for certain; the worked example before `vt` has 5 lines of noise, as few as RULER's may have; and an
answer's lead has no space at its end, which would be a token of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from string import ascii_lowercase, ascii_uppercase
from uuid import UUID

from server.evaluation.suites.task import SuiteTask, TaskSample, Turn, match_all
from server.evaluation.suites.words import draw_pair, draw_words

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HOPS = 4  # of the chain of `vt`
NUM_COMMON = 10  # words that `cwe` asks for
CODED_LENGTH = 6  # letters of a word of `fwe`
NUM_FREQUENT = 3  # words that `fwe` asks for
LONG = 4096  # tokens from which `cwe` repeats its words more often


# ---------------------------------------------------------------- needles in a haystack
def draw_number(rng: Random) -> str:
    """Return a number of seven digits."""
    return str(rng.randint(10**6, 10**7 - 1))


def draw_uuid(rng: Random) -> str:
    """Return a random UUID."""
    return str(UUID(int=rng.getrandbits(128), version=4))


def draw_needle(
    rng: Random,
    size: int,
    length: int,
    *,
    key: Callable[[Random], str],
    value: Callable[[Random], str],
    kind: str,
    amid_needles: bool,
) -> TaskSample:
    """Return `size` sentences with one needle among them: noise, or with `amid_needles` others of its form."""

    def write(name: str) -> str:
        return f"One of the special magic {kind}s for {name} is: {answers.setdefault(name, value(rng))}."

    answers: dict[str, str] = {}
    query = key(rng)
    needle = write(query)
    while amid_needles and len(answers) <= size:
        write(key(rng))
    sentences = [write(name) for name in list(answers)[1:]] if amid_needles else [NOISE] * size
    sentences.insert(rng.randrange(size), needle)
    context = (
        f"A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the {kind} afterwards.\n" + "\n".join(sentences)
    )
    about = f"the special magic {kind} for {query} mentioned in the provided text"
    turn = Turn(f"\nWhat is {about}?", [answers[query]], f"The{about.removeprefix('the')} is")
    return TaskSample(context, [turn], max_tokens=128)


# ---------------------------------------------------------------- variable tracking
def draw_chain(rng: Random, hops: int, letters: int, taken: set[str]) -> tuple[str, list[str]]:
    """Return a value and the names of the variables that have it, one assigned to the next; all are new to `taken`."""
    names: list[str] = []
    while len(names) <= hops:
        name = "".join(rng.choices(ascii_uppercase, k=letters))
        if name not in taken:
            taken.add(name)
            names.append(name)
    while (value := str(rng.randrange(10_000, 99_999))) in taken:
        pass
    taken.add(value)
    return value, names


def write_chains(rng: Random, size: int, chains: Sequence[tuple[str, list[str]]]) -> str:
    """Return `size` lines of noise, among which the assignments of each chain stand in their order."""
    lines = [NOISE] * size
    for value, names in chains:
        sources = [value, *(f"VAR {name}" for name in names)]
        assigned = [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=False)]
        for shift, (place, line) in enumerate(
            zip(sorted(rng.sample(range(len(lines)), len(names))), assigned, strict=True)
        ):
            lines.insert(place + shift, line)
    return "\n".join(lines)


def draw_tracking(rng: Random, size: int, length: int) -> TaskSample:
    """Return a chain of five variables in noise, after a worked example with shorter names."""
    taken = set[str]()
    example, chain = draw_chain(rng, HOPS, 3, taken), draw_chain(rng, HOPS, 5, taken)
    intro = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    (shown, shown_turn), (context, turn) = [
        (intro + write_chains(rng, lines, [each]) + "\n", _ask_for_variables(*each))
        for lines, each in ((5, example), (size, chain))
    ]
    worked = f"{shown}{shown_turn.question} {shown_turn.lead} {' '.join(example[1])}\n\n"
    return TaskSample(worked + context, [turn], max_tokens=30)


def _ask_for_variables(value: str, names: Sequence[str]) -> Turn:
    return Turn(
        f"Question: Find all variables that are assigned the value {value} in the text above.",
        names,
        f"Answer: According to the chain(s) of variable assignment in the text above, {len(names)} variables are "
        f"assigned the value {value}, they are:",
    )


# ---------------------------------------------------------------- common and frequent words
def draw_common_words(rng: Random, size: int, length: int) -> TaskSample:
    """Return a numbered list of `size` different words, of which ten are repeated more often, after an example."""
    sizes = [(20, 3, 1), (size, 6, 1)] if length < LONG else [(40, 10, 3), (size, 30, 3)]
    (shown, shown_turn), (context, turn) = [_list_words(rng, *each) for each in sizes]
    numbered = " ".join(f"{i}. {word}" for i, word in enumerate(shown_turn.answers, 1))
    worked = f"{shown}{shown_turn.question} {shown_turn.lead} {numbered}\n"
    return TaskSample(worked + context, [turn], max_tokens=120)


def _list_words(rng: Random, size: int, common_repeats: int, other_repeats: int) -> tuple[str, Turn]:
    words = draw_words(rng, size)
    common, others = words[:NUM_COMMON], words[NUM_COMMON:]
    listed = common * common_repeats + others * other_repeats
    rng.shuffle(listed)
    context = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n" + " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1)) + "\n"
    )
    question = f"Question: What are the {NUM_COMMON} most common words in the above list?"
    lead = f"Answer: The top {NUM_COMMON} words that appear most often in the list are:"
    return context, Turn(question, common, lead)


def draw_frequent_words(rng: Random, size: int, length: int) -> TaskSample:
    """Return a text of about `size` coded words, whose frequencies fall as the squares of their ranks (zeta of 2)."""
    coded: dict[str, None] = {"...": None}  # the most frequent one is noise
    while len(coded) < max(length // 50, NUM_FREQUENT + 2):
        coded["".join(rng.choices(ascii_lowercase, k=CODED_LENGTH))] = None
    share = 6 / math.pi**2  # of the most frequent word
    text = [word for rank, word in enumerate(coded, 1) for _ in range(int(size * share / rank**2))]
    rng.shuffle(text)
    context = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(text)}\n"
    )
    question = (
        "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?"
    )
    lead = "Answer: According to the coded text above, the three most frequently appeared words are:"
    return TaskSample(context, [Turn(question, list(coded)[1 : NUM_FREQUENT + 1], lead)], max_tokens=50)


_NEEDLES = {
    "niah_single_1": partial(draw_needle, key=draw_pair, value=draw_number, kind="number", amid_needles=False),
    "niah_multikey_2": partial(draw_needle, key=draw_pair, value=draw_number, kind="number", amid_needles=True),
    "niah_multikey_3": partial(draw_needle, key=draw_uuid, value=draw_uuid, kind="uuid", amid_needles=True),
}
RULER = (
    *(SuiteTask(name, draw, match_all, least=5) for name, draw in _NEEDLES.items()),
    SuiteTask("vt", draw_tracking, match_all, least=5),
    SuiteTask("cwe", draw_common_words, match_all, least=NUM_COMMON + 5),
    SuiteTask("fwe", draw_frequent_words, match_all, least=150),
)
