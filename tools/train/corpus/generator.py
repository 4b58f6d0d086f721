"""Generates stories, records (facts such as who keeps what where, and later questions about them) and chats.

A `DocumentGenerator` is an endless, seeded source of documents. A document is a list of `TextPiece`s, which mark
the characters that state or answer a fact. Lengths are in characters; packing.py tokenizes.
"""

import heapq
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Generic, TypeVar

from server.evaluation.pieces import END, PieceKind, TextPiece
from tools.train.corpus import plots, smalltalk, words
from tools.train.corpus.facts import Fact, draw_fact
from tools.train.corpus.templates import choose, expand
from tools.train.corpus.words import Lexicon, Person

T = TypeVar("T")

STRANGERS_IN_RECORDS, STRANGERS_IN_STORIES = 0.4, 0.04  # share of people whose name is an invented word
GUESTS_IN_STORIES = 0.1  # share of people with rare names, so that a model has to read names instead of guessing them
INVENTED_OBJECTS = 0.25  # share of objects in records that are invented words
NEAREST_QUESTION = 15  # least number of characters between a fact and the first question about it
ASKED_TWICE_SHARE = 0.5  # share of facts with a second question, if there is room for it
SHORT_RECORD = 1500  # a record with fewer characters gets more facts, so that it has answers


Document = list[TextPiece]


def join_text(document: Document) -> str:
    return "".join("\n" if piece.kind is PieceKind.END else piece.text for piece in document)


class Deck(Generic[T]):
    """Draws items in random order without replacement, and starts again when all have been drawn."""

    def __init__(self, rng: Random, cards: Sequence[T]) -> None:
        self._rng, self._cards = rng, cards
        self._left: list[T] = []

    def draw(self) -> T:
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        return self._left.pop()


class DocumentGenerator:
    """Makes documents with the words of one lexicon; the same seed makes the same documents in the same order."""

    def __init__(self, seed: int | str, lexicon: Lexicon = words.TRAIN) -> None:
        self.rng = Random(seed)
        self.lexicon = lexicon
        self._openings = Deck(self.rng, plots.OPENINGS)
        self._plots = Deck(self.rng, plots.PLOTS)
        self._closings = Deck(self.rng, plots.CLOSINGS)
        self._nouns = Deck(self.rng, lexicon.objects)
        self._people = Deck(self.rng, lexicon.people)
        self._heroes = Deck(self.rng, lexicon.heroes)
        self._friends = Deck(self.rng, lexicon.friends)

    # ---- stories

    def make_story(self) -> Document:
        return self._write_story(self._slots(*self._hero_and_friend()))

    def _hero_and_friend(self) -> tuple[Person, Person]:
        hero, friend = self._character(self._heroes), self._character(self._friends)
        return (hero, friend) if hero.name != friend.name else self._hero_and_friend()

    def _character(self, usual: Deck[Person]) -> Person:
        chance = self.rng.random()
        if chance < STRANGERS_IN_STORIES:
            return self._stranger()
        return (self._people if chance < STRANGERS_IN_STORIES + GUESTS_IN_STORIES else usual).draw()

    def _stranger(self) -> Person:
        return Person(words.invent_word(self.rng).capitalize(), self.rng.random() < 0.5)

    def draw_cast(self, size: int) -> list[Person]:
        """Draw `size` people with different names, some of them invented, for a record."""
        cast: dict[str, Person] = {}
        while len(cast) < size:
            person = self._people.draw()
            if self.rng.random() < STRANGERS_IN_RECORDS:
                person = self._stranger()
            cast[person.name] = person
        return list(cast.values())

    def _write_story(self, slots: Mapping[str, str]) -> Document:
        return [TextPiece(" ".join(self._sentences(slots))), END]

    def _sentences(self, slots: Mapping[str, str]) -> Iterator[str]:
        # A story contains each aside at most once, or a model would learn to loop.
        asides = iter(self.rng.sample(plots.ASIDES, len(plots.ASIDES)))
        yield expand(self.rng, self._openings.draw(), slots)
        if self.rng.random() < 0.4:
            yield expand(self.rng, next(asides), slots)
        for sentence in self._plots.draw():
            yield expand(self.rng, sentence, slots)
            if self.rng.random() < 0.1:
                yield expand(self.rng, next(asides), slots)
        yield expand(self.rng, self._closings.draw(), slots)

    def _slots(self, hero: Person, friend: Person) -> dict[str, str]:
        rng, noun = self.rng, self._nouns.draw()
        slots = {"H": hero.name, "F": friend.name, "kid": "girl" if hero.female else "boy"}
        for name, person in (("h", hero), ("f", friend)):
            pronouns = ("she", "her", "her") if person.female else ("he", "his", "him")
            slots |= dict(zip((name, f"{name}s", f"{name}m"), pronouns, strict=True))
        for names, options in (
            (("p", "q"), words.BUILDINGS),
            (("food", "food2"), words.FOODS),
            (("m", "m2"), words.MATERIALS),
            (("job", "job2"), words.JOBS),
            (("an", "an2"), words.ANIMALS),
            (("t",), words.TEMPERS),
            (("t2", "t3"), words.COATS),
            (("spot",), words.SPOTS),
            (("w", "w2"), words.WEATHER),
        ):
            slots |= dict(zip(names, rng.sample(options, len(names)), strict=True))
        return slots | {"o": f"{rng.choice(words.ADJECTIVES)} {noun}", "ob": noun}

    # ---- chats

    def make_chat(self) -> Document:
        """Make a request and its answer in the chat template's format: a story, small talk, or facts and a question."""
        rng = self.rng
        kind = rng.choices(("story", "greeting", "question", "facts"), (4, 2, 1, 3))[0]
        if kind == "facts":
            return self._make_facts_chat()
        if kind == "story":
            slots = self._slots(*self._hero_and_friend())
            return [
                TextPiece(f"Q: {expand(rng, rng.choice(smalltalk.STORY_REQUESTS), slots)}\nA: "),
                *self._write_story(slots),
            ]
        pairs = smalltalk.GREETINGS if kind == "greeting" else smalltalk.PLAIN_QUESTIONS
        question, answer = rng.choice(pairs)
        return [TextPiece(f"Q: {choose(rng, question)}\nA: {choose(rng, answer)}"), END]

    def _make_facts_chat(self) -> Document:
        facts = self._facts(self.draw_cast(3), self.rng.randint(1, 5))
        document = [TextPiece("Q: ")]
        for index, fact in enumerate(facts):
            document += [*_make_pieces(fact.statement, fact, index, PieceKind.VALUE), TextPiece(" ")]
        index = self.rng.randrange(len(facts))
        answer = self.rng.choice(facts[index].answers)
        document += [
            TextPiece(f"{facts[index].question}\nA: "),
            *_make_pieces(answer, facts[index], index, PieceKind.ANSWER),
            END,
        ]
        return document

    def _facts(self, cast: Sequence[Person], count: int) -> list[Fact]:
        used: set[tuple[str, ...]] = set()
        facts: list[Fact] = []
        while len(facts) < count:
            fact = draw_fact(self.rng, self.lexicon, cast, self.draw_object(), used)
            if fact:
                facts.append(fact)
        return facts

    # ---- records

    def draw_object(self) -> str:
        """Draw an object for a fact; repetitions are rare, so that few facts of a record are alike."""
        return words.invent_word(self.rng) if self.rng.random() < INVENTED_OBJECTS else self._nouns.draw()

    def make_record(self, length: int) -> Document:
        """Make about `length` characters of story with facts in between, and one or two questions about most facts."""
        return _Record(self, length).write()

    def iter_filler(self, cast: Sequence[Person]) -> Iterator[str]:
        """Yield an endless series of sentences about the cast, each with the space or blank line that follows it."""
        while True:
            *sentences, last = self._sentences(self._slots(*self.rng.sample(cast, 2)))
            yield from (f"{sentence} " for sentence in sentences)
            yield f"{last}\n\n"


def _make_pieces(sentence: str, fact: Fact, index: int, kind: PieceKind) -> Document:
    """Return the sentence as pieces: the text before "@", the fact's value with a space before it, and the rest."""
    before, after = sentence.split(" @")
    return [TextPiece(before), TextPiece(f" {fact.value}", kind, index), TextPiece(after)]


class _Record:
    """A record that is being written: the facts stated so far, and the positions of questions still to come."""

    def __init__(self, generator: DocumentGenerator, length: int) -> None:
        self.generator, self.rng, self.length = generator, generator.rng, length
        self.cast = generator.draw_cast(self.rng.randint(5, 12))
        self.document: Document = []
        self.facts: list[Fact] = []
        self.used: set[tuple[str, ...]] = set()
        self.due: list[tuple[int, int]] = []  # heap of planned questions: (position in characters, index of the fact)
        self.position = 0
        crowded = length < SHORT_RECORD
        # The share of sentences that state a fact; questions are not counted.
        self.fact_share = self.rng.choice((0.6, 0.8) if crowded else (0.25, 0.5, 0.75))

    def write(self) -> Document:
        filler = self.generator.iter_filler(self.cast)
        # A record begins with a fact, so that only stories begin with a story's opening, such as "Once upon a time".
        self._state_fact()
        while self.position < self.length:
            if self.due and self.due[0][0] <= self.position:
                self._ask_question(heapq.heappop(self.due)[1])
            elif self.rng.random() < self.fact_share:
                self._state_fact()
            else:
                self._add(TextPiece(next(filler)))
        return [*self.document, END]

    def _add(self, *pieces: TextPiece) -> None:
        self.document += pieces
        self.position += sum(len(piece.text) for piece in pieces)

    def _state_fact(self) -> None:
        fact = draw_fact(self.rng, self.generator.lexicon, self.cast, self.generator.draw_object(), self.used)
        if fact is None:
            return
        index = len(self.facts)
        self.facts.append(fact)
        before = self.rng.choice(("", "", "", "Remember this: ", "Everybody knew it: ", "Note: "))
        self._add(TextPiece(before), *_make_pieces(fact.statement, fact, index, PieceKind.VALUE), TextPiece(" "))
        self._plan_questions(index)

    def _plan_questions(self, index: int) -> None:
        """Plan up to two questions about a fact, the second at least twice as far from it as the first."""
        room = self.length - self.position
        first = self._distance(NEAREST_QUESTION, room)
        if first is None:
            return
        heapq.heappush(self.due, (self.position + first, index))
        second = self._distance(2 * first + 400, room)
        if second is not None and self.rng.random() < ASKED_TWICE_SHARE:
            heapq.heappush(self.due, (self.position + second, index))

    def _distance(self, nearest: int, farthest: int) -> int | None:
        """Draw the number of characters from a fact to a question: half of the draws log-uniform, half uniform.

        So near and far questions are both common. None if `nearest` is not less than `farthest`.
        """
        if nearest >= farthest:
            return None
        if self.rng.random() < 0.5:
            return self.rng.randint(nearest, farthest)
        return int(math.exp(self.rng.uniform(math.log(nearest), math.log(farthest))))

    def _ask_question(self, index: int) -> None:
        fact, rng = self.facts[index], self.rng
        answer = _make_pieces(rng.choice(fact.answers), fact, index, PieceKind.ANSWER)
        form = rng.randrange(4)
        if form == 0:
            self._add(TextPiece(f"\nQ: {fact.question}\nA: "), *answer, END)
        elif form == 1:
            self._add(TextPiece(f"\n{fact.question} "), *answer, TextPiece("\n"))
        elif form == 2:
            # Choose speakers whom the fact does not name: otherwise their names would give the answer away.
            spoken_of = {*re.findall(r"\w+", fact.statement), fact.value}
            asking, telling = rng.sample([p for p in self.cast if p.name not in spoken_of], 2)
            spoken = [*answer[:-1], TextPiece(answer[-1].text.removesuffix(".") + ",")]
            self._add(
                TextPiece(f'"{fact.question}" asked {asking.name}. "'),
                *spoken,
                TextPiece(f'" said {telling.name}. '),
            )
        else:
            # mark the sentence as a repetition: otherwise a model would learn to repeat sentences
            again = rng.choice(("As before: ", "Do not forget: "))
            self._add(TextPiece(again), *_make_pieces(fact.answers[-1], fact, index, PieceKind.ANSWER), TextPiece(" "))
