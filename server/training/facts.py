"""The kinds of fact a record can hold, and the phrasings that state, ask and answer them.

In every phrasing the value stands last, as `@`, so that what leads up to it ("... in the") is the same when the fact
is stated and when it is asked. Each kind has phrasings for training and others that only evaluation may use.
This file does not know where in a text a fact is stated or asked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from server.training import words
from server.training.templates import fill
from server.training.words import Lexicon, Person

Draw = Callable[[Random, Sequence[Person]], str]


@dataclass(frozen=True)
class Phrasings:
    """Templates over N (a person), o (an object), ob (its noun), p (a place), an (an animal)."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class FactKind:
    name: str
    key: tuple[str, ...]  # the slots that tell two facts of this kind apart
    value: Draw
    training: Phrasings
    held_out: Phrasings

    def phrasings(self, held_out: bool) -> Phrasings:
        return self.held_out if held_out else self.training


@dataclass(frozen=True)
class Fact:
    """One fact in words; the `@` in statement and answers stands for the value."""

    value: str
    statement: str
    question: str
    answers: tuple[str, ...]


def _one_of(options: Sequence[str]) -> Draw:
    return lambda rng, cast: rng.choice(options)


def _number(rng: Random, cast: Sequence[Person]) -> str:
    return "".join(rng.choice("0123456789") for _ in range(4))


def _invented(rng: Random, cast: Sequence[Person]) -> str:
    return words.invented_word(rng)


def _invented_name(rng: Random, cast: Sequence[Person]) -> str:
    return words.invented_word(rng).capitalize()


def _somebody(rng: Random, cast: Sequence[Person]) -> str:
    return rng.choice(cast).name


KEEPS = FactKind(
    "keeps",
    ("N", "o"),
    _one_of(words.PLACES),
    Phrasings(
        (
            "$N keeps the $o in the @.",
            "$N put the $o in the @.",
            "$N left the $o in the @.",
            "$N's $o is in the @.",
            "The $o of $N is in the @.",
        ),
        (
            "Where does $N keep the $o?",
            "Where is the $o of $N?",
            "Where is $N's $o?",
            "Where can I find the $o of $N?",
        ),
        ("In the @.", "It is in the @.", "$N keeps the $o in the @.", "$N's $o is in the @.", "The $o is in the @."),
    ),
    Phrasings(
        ("$N has hidden the $o in the @.", "You will find the $o of $N in the @."),
        ("In which place is the $o that $N has?",),
        ("$N has the $o in the @.",),
    ),
)
LIKES = FactKind(
    "likes",
    ("N",),
    _one_of(words.FOODS),
    Phrasings(("$N likes @ best.",), ("What does $N like best?",), ("$N likes @ best.",)),
    Phrasings(("More than anything else, $N likes @.",), ("Which food does $N like?",), ("$N likes @.",)),
)
COLOR = FactKind(
    "color",
    ("N", "ob"),
    _one_of(words.COLORS),
    Phrasings(
        ("The color of $N's $ob is @.", "$N has a $ob, and its color is @."),
        ("What is the color of $N's $ob?", "What color is the $ob of $N?"),
        ("It is @.", "The color is @.", "The color of $N's $ob is @."),
    ),
    Phrasings(("$N's $ob has the color @.",), ("What color does $N's $ob have?",), ("It has the color @.",)),
)
NUMBER = FactKind(
    "number",
    ("p",),
    _number,
    Phrasings(
        ("The number of the $p is @.", "On the door of the $p the number is @."),
        ("What is the number of the $p?", "Which number does the $p have?"),
        ("It is @.", "The number is @.", "The number of the $p is @."),
    ),
    Phrasings(("The secret number of the $p is @.",), ("Tell me the number of the $p.",), ("It has the number @.",)),
)
TOWN = FactKind(
    "town",
    ("N",),
    _invented_name,
    Phrasings(
        ("$N comes from a town called @.", "$N grew up in a town called @."),
        ("Which town does $N come from?", "Where does $N come from?"),
        ("A town called @.", "$N comes from a town called @."),
    ),
    Phrasings(("$N was born in a place called @.",), ("What is the home town of $N?",), ("A place called @.",)),
)
PET = FactKind(
    "pet",
    ("N", "an"),
    _invented_name,
    Phrasings(
        ("$N has a $an named @.", "$N lives with a $an named @."),
        ("What is the name of $N's $an?", "What is the $an of $N named?"),
        ("It is named @.", "$N has a $an named @."),
    ),
    Phrasings(("$N takes care of a $an named @.",), ("How is $N's $an named?",), ("The $an is named @.",)),
)
GAVE = FactKind(
    "gave",
    ("N", "o"),
    _somebody,
    Phrasings(
        ("$N gave the $o to @.", "$N sold the $o to @."),
        ("Who got the $o from $N?", "To whom did $N give the $o?"),
        ("It went to @.", "$N gave the $o to @."),
    ),
    Phrasings(("$N handed the $o over to @.",), ("Who has the $o of $N now?",), ("$N handed it over to @.",)),
)
SECRET = FactKind(
    "secret",
    ("N",),
    _invented,
    Phrasings(
        ("The secret word of $N is @.", "$N has a secret word, and it is @."),
        ("What is the secret word of $N?", "What is $N's secret word?"),
        ("It is @.", "The secret word is @.", "The secret word of $N is @."),
    ),
    Phrasings(("$N's magic word is @.",), ("What is the magic word of $N?",), ("The magic word is @.",)),
)

KINDS = (KEEPS, LIKES, COLOR, NUMBER, TOWN, PET, GAVE, SECRET)
WEIGHTS = (4, 1, 1, 1, 1, 1, 1, 1)  # "who keeps what where" is what the model is for


def draw_fact(
    rng: Random, lexicon: Lexicon, cast: Sequence[Person], noun: str, used: set[tuple[str, ...]]
) -> Fact | None:
    """A fact about somebody of the cast, or None if the one drawn would contradict one in `used`."""
    kind = rng.choices(KINDS, WEIGHTS)[0]
    slots = {
        "N": rng.choice(cast).name,
        "o": f"{rng.choice(words.ADJECTIVES)} {noun}",
        "ob": noun,
        "p": rng.choice(words.PLACES),
        "an": rng.choice(words.ANIMALS),
    }
    key = (kind.name, *(slots[name] for name in kind.key))
    value = kind.value(rng, cast)
    if key in used or value == slots["N"]:
        return None
    used.add(key)
    phrasings = kind.phrasings(lexicon.held_out)
    return Fact(
        value,
        fill(rng.choice(phrasings.statements), slots),
        fill(rng.choice(phrasings.questions), slots),
        tuple(fill(answer, slots) for answer in phrasings.answers),
    )
