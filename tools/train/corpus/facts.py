"""The kinds of facts in records, with the phrasings that state them, ask for them and answer.

In every phrasing the value, written `@`, is the last word or nearly so. In a training phrasing the answer is a whole
sentence, with the same words before the value as in the statement ("... the blue lamp in the @"): a match of the last
few words finds the value, whatever the names. Each kind also has held-out phrasings, which only evaluation may use.
Where in a text a fact is stated and asked is decided in generator.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tools.train.corpus import words
from tools.train.corpus.templates import fill
from tools.train.corpus.words import Lexicon, Person

Draw = Callable[[Random, Sequence[Person]], str]


@dataclass(frozen=True)
class Phrasings:
    """Sentence templates for one kind of fact.

    Their slots are N (a person), o (an object), ob (its noun), p (a place) and an (an animal).
    """

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class FactKind:
    name: str
    key_slots: tuple[str, ...]  # slots that identify a fact of this kind, its key; a record has one value per key
    draw_value: Draw
    training: Phrasings
    held_out: Phrasings

    def phrasings(self, held_out: bool) -> Phrasings:
        return self.held_out if held_out else self.training


@dataclass(frozen=True)
class Fact:
    """A fact as sentences; the `@` in the statement and the answers stands for the value."""

    value: str
    statement: str
    question: str
    answers: tuple[str, ...]


def _one_of(options: Sequence[str]) -> Draw:
    return lambda rng, cast: rng.choice(options)


def _number(rng: Random, cast: Sequence[Person]) -> str:
    return "".join(rng.choice("0123456789") for _ in range(4))


def _invented(rng: Random, cast: Sequence[Person]) -> str:
    return words.invent_word(rng)


def _invented_name(rng: Random, cast: Sequence[Person]) -> str:
    return words.invent_word(rng).capitalize()


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
            "$N hid the $o in the @.",
            "$N found a place for the $o in the @.",
        ),
        (
            "Where does $N keep the $o?",
            "Where is the $o of $N?",
            "Where is $N's $o?",
            "Where can I find the $o of $N?",
            "Do you know where $N keeps the $o?",
        ),
        ("$N keeps the $o in the @.",),
    ),
    Phrasings(
        ("$N stores the $o in the @.", "You will find $N's $o in the @."),
        ("In which place is the $o that $N has?",),
        ("$N has the $o in the @.",),
    ),
)
LIKES = FactKind(
    "likes",
    ("N",),
    _one_of(words.FOODS),
    Phrasings(
        ("$N likes @ best.", "Of all food, $N likes @ best."),
        ("What does $N like best?", "Which food does $N like best?"),
        ("$N likes @ best.",),
    ),
    Phrasings(("More than anything else, $N likes @.",), ("Which food does $N like?",), ("$N likes @.",)),
)
COLOR = FactKind(
    "color",
    ("ob",),
    _one_of(words.COLORS),
    Phrasings(
        ("The color of $N's $ob is @.", "It is true that $N's $ob is @.", "$N has a $ob, and $N's $ob is @."),
        ("What is the color of $N's $ob?", "What color is the $ob of $N?"),
        ("The color of $N's $ob is @.", "$N's $ob is @."),
    ),
    Phrasings(("$N's $ob has the color @.",), ("What color does $N's $ob have?",), ("It has the color @.",)),
)
NUMBER = FactKind(
    "number",
    ("p",),
    _number,
    Phrasings(
        ("The number of the $p is @.", "On the door one can read that the number of the $p is @."),
        ("What is the number of the $p?", "Which number does the $p have?"),
        ("The number of the $p is @.",),
    ),
    Phrasings(("The secret number of the $p is @.",), ("Tell me the number of the $p.",), ("It has the number @.",)),
)
TOWN = FactKind(
    "town",
    ("N",),
    _invented_name,
    Phrasings(
        ("The town of $N is called @.", "The old town of $N is called @."),
        ("What is the town of $N called?", "Where does $N come from?"),
        ("The town of $N is called @.",),
    ),
    Phrasings(("$N was born in a place called @.",), ("What is the home town of $N?",), ("A place called @.",)),
)
PET = FactKind(
    "pet",
    ("an",),
    _invented_name,
    Phrasings(
        ("The name of $N's $an is @.", "$N has a $an, and the name of $N's $an is @."),
        ("What is the name of $N's $an?", "What is the $an of $N named?"),
        ("The name of $N's $an is @.",),
    ),
    Phrasings(("$N takes care of a $an named @.",), ("How is $N's $an named?",), ("The $an is named @.",)),
)
GAVE = FactKind(
    "gave",
    ("o",),
    _somebody,
    Phrasings(
        ("$N gave the $o to @.", "$N sold the $o to @."),
        ("Who got the $o from $N?", "To whom did $N give the $o?"),
        ("$N gave the $o to @.",),
    ),
    Phrasings(("$N handed the $o over to @.",), ("Who has the $o of $N now?",), ("$N handed it over to @.",)),
)
SECRET = FactKind(
    "secret",
    ("N",),
    _invented,
    Phrasings(
        ("The secret word of $N is @.", "Nobody knows that the secret word of $N is @."),
        ("What is the secret word of $N?", "What is $N's secret word?", "Tell me the secret word of $N."),
        ("The secret word of $N is @.",),
    ),
    Phrasings(("$N's magic word is @.",), ("What is the magic word of $N?",), ("The magic word is @.",)),
)

KINDS = (KEEPS, LIKES, COLOR, NUMBER, TOWN, PET, GAVE, SECRET)
WEIGHTS = (4, 1, 1, 1, 1, 1, 1, 1)  # relative frequencies of the kinds; KEEPS ("who keeps what where") is the main task


def draw_fact(
    rng: Random, lexicon: Lexicon, cast: Sequence[Person], noun: str, used: set[tuple[str, ...]]
) -> Fact | None:
    """Draw a fact about a person of the cast; return None if it cannot be used.

    `used` holds the keys (kind, words of its key slots) of earlier facts. A fact with such a key, or whose value is the
    person's own name, cannot be used; the key of any other is added to `used`.
    """
    kind = rng.choices(KINDS, WEIGHTS)[0]
    slots = {
        "N": rng.choice(cast).name,
        "o": f"{rng.choice(words.ADJECTIVES)} {noun}",
        "ob": noun,
        "p": rng.choice(words.BUILDINGS),
        "an": rng.choice(words.ANIMALS),
    }
    key = (kind.name, *(slots[name] for name in kind.key_slots))
    value = kind.draw_value(rng, cast)
    if key in used or value == slots["N"]:
        return None
    used.add(key)
    phrasings = kind.phrasings(lexicon.new_phrasings)
    return Fact(
        value,
        fill(rng.choice(phrasings.statements), slots),
        fill(rng.choice(phrasings.questions), slots),
        tuple(fill(answer, slots) for answer in phrasings.answers),
    )
