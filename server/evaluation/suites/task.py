"""What a task is: it draws samples, and scores an answer from 0 to 1. Knows neither models nor strategies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

Message = Mapping[str, Any]  # of a conversation, as a chat template takes it


class Asking(StrEnum):
    """How several questions about one context are asked."""

    TURNS = "turns"  # in one conversation: each question follows the right answers to those before
    REQUESTS = "requests"  # each in a request of its own, which begins with the same context


@dataclass(frozen=True)
class Turn:
    """A question about the context, and what is right."""

    question: str
    answers: Sequence[str]  # the texts that a right answer has, or the only one that it is
    lead: str = ""  # the beginning of the answer, which the model continues

    @property
    def right_answer(self) -> str:
        """Return what an assistant that knows the answer would say."""
        return " ".join(filter(None, (self.lead, ", ".join(self.answers))))


@dataclass(frozen=True)
class TaskSample:
    """A context with questions; the first user's message has the context and the first question."""

    context: str
    turns: Sequence[Turn]
    max_tokens: int  # of an answer
    earlier: Sequence[Message] = ()  # a conversation before the context
    tools: Sequence[Mapping[str, Any]] = ()  # that the model may call; a right answer is a call
    is_chat: bool = True  # false: a text to go on with, also for models with a chat template


@dataclass(frozen=True)
class SuiteTask:
    """A task: how a sample is drawn, and how an answer is scored."""

    name: str
    # Returns a sample for a size (sentences, pairs, words, ...) and the most tokens of prompt and answer
    draw: Callable[[Random, int, int], TaskSample]
    score: Callable[[str, Sequence[str]], float]  # of (what the model wrote after the lead, the right texts)
    least: int  # the smallest size
    most: int = 1 << 16  # the largest size, for tasks that do not fill any length
    asking: Asking = Asking.REQUESTS


def match_all(answer: str, right: Sequence[str]) -> float:
    """Return the share of the right texts that are in the answer, in any case of letters, as RULER scores."""
    return sum(each.lower() in answer.lower() for each in right) / len(right)


def match_first_number(answer: str, right: Sequence[str]) -> float:
    """Return 1 if the first number in the answer is the right one, as SCBench scores Math.Find; otherwise 0."""
    found = re.search(r"\d+(\.\d+)?", answer)
    return float(found is not None and float(found[0]) == float(right[0]))
