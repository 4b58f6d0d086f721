"""Types of a promise, its check and the outcome of that; the promises themselves are in other modules."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch

TrialT = TypeVar("TrialT")
LAST_CALLS = "the last calls were:"  # begins a note of an error in a history
OWN = Path(__file__).parent  # the messages of assertions in this folder need no place in the source beside them


def always(trial: object) -> bool:
    """Return True: the promise is made by every class."""
    return True


@dataclass(frozen=True)
class Promise(Generic[TrialT]):
    """Something that a class promises to the server, and the check of it."""

    name: str  # in words, such as "frees all memory"
    expected: str  # what holds if it is kept, as a sentence
    check: Callable[[TrialT], None]  # raises if it is broken
    is_made: Callable[[TrialT], bool] = always  # whether an instance with these options makes it

    def __call__(self, trial: TrialT) -> None:
        self.check(trial)


def promise(
    name: str, expected: str, is_made: Callable[[Any], bool] = always
) -> Callable[[Callable[[TrialT], None]], Promise[TrialT]]:
    """Return a decorator that turns the function that checks a promise into this promise."""
    return lambda check: Promise(name, expected, check, is_made)


@dataclass(frozen=True)
class CheckCase:
    """A promise of a class with certain options, ready to be checked."""

    promise: str
    options: str  # in words, such as "the defaults"
    expected: str
    seed: int
    run: Callable[[random.Random], bool]  # returns False if the promise is not made; raises if it is broken
    author_files: Sequence[Path] = ()  # the source of the class, so that an error can be shown where it was raised

    def __str__(self) -> str:
        return f"{self.promise} [{self.options}]"

    def check(self) -> bool:
        """Check the promise, with random numbers of its own; return whether it is made. Raises if it is broken."""
        rng = random.Random(f"{self.seed} {self}")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # small tensors gain nothing from more
        try:
            return self.run(rng)
        except Exception as error:
            error.add_note(f"The promise: {self.expected}. Options: {self.options}; seed {self.seed}.")
            raise
        finally:
            torch.set_num_threads(threads)

    def find_outcome(self) -> CheckOutcome:
        """Check the promise; return what came of it, in words."""
        try:
            return CheckOutcome(self, "kept" if self.check() else "not promised")
        except Exception as error:  # a class may raise anything
            return CheckOutcome(self, "broken", describe_failure(error, self.author_files))


@dataclass(frozen=True)
class CheckOutcome:
    """What came of a case."""

    case: CheckCase
    result: Literal["kept", "broken", "not promised"]
    found: str = ""  # what was found instead, if it is broken


def describe_failure(error: BaseException, author_files: Sequence[Path] = ()) -> str:
    """Return what went wrong in a check, as one line; an error that was raised elsewhere with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    text, last = " ".join(str(error).split()), frames[-1]
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()) if note.startswith(LAST_CALLS))
    if isinstance(error, AssertionError) and text and OWN in Path(last.filename).parents:
        return text + notes
    frame = next((each for each in reversed(frames) if Path(each.filename) in author_files), last)
    place = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    return f"{type(error).__name__}: {text or last.line} ({place}){notes}"
