"""Makes the prompts of a coding agent's conversation, as token ids: each turn's prompt has the messages before it.

Lengths are drawn: a long system message with tools, short requests, answers, and long results of tools. Conversations
change as those of agents do: a time that drifts, a request that is edited later, an answer that is asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

END = 1  # the token that ends a message
VOCABULARY = 50_000
SYSTEM_TOKENS = 3000
TIME_TOKENS = 8
REQUEST_TOKENS, ANSWER_TOKENS, RESULT_TOKENS = (40, 400), (30, 300), (100, 1500)


class Turn(NamedTuple):
    """One request to the server, and its answer."""

    prompt: list[int]
    answer: list[int]


class Conversation:
    """Messages so far; draws new ones."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.system = self.draw(SYSTEM_TOKENS)
        self.messages: list[list[int]] = []

    def draw(self, count: int) -> list[int]:
        """Return random tokens of a text."""
        return [self._rng.randrange(2, VOCABULARY) for _ in range(count)]

    def draw_message(self, sizes: tuple[int, int]) -> list[int]:
        """Return a message, with its end."""
        return [*self.draw(self._rng.randint(*sizes)), END]

    def ask(self) -> Turn:
        """Add a request or a tool's result, and an answer; return the turn."""
        self.messages.append(self.draw_message(REQUEST_TOKENS if self._rng.random() < 0.3 else RESULT_TOKENS))
        return self.answer()

    def answer(self, *, system: list[int] | None = None) -> Turn:
        """Add an answer to the messages; return the turn."""
        prompt = [*(self.system if system is None else system), END, *(t for each in self.messages for t in each)]
        answer = self.draw_message(ANSWER_TOKENS)
        self.messages.append(answer)
        return Turn(prompt, answer)


def grow(rng: Random, num_turns: int) -> list[Turn]:
    """Return a conversation that only grows."""
    conversation = Conversation(rng)
    return [conversation.ask() for _ in range(num_turns)]


def drift(rng: Random, num_turns: int) -> list[Turn]:
    """Return a conversation whose last message begins with the time, which later prompts do not have."""
    conversation, turns = Conversation(rng), []
    for _ in range(num_turns):
        message = conversation.draw_message(REQUEST_TOKENS)
        conversation.messages.append([*conversation.draw(TIME_TOKENS), *message])
        turns.append(conversation.answer())
        conversation.messages[-2] = message
    return turns


def stamp(rng: Random, num_turns: int) -> list[Turn]:
    """Return a conversation whose system message ends with the time."""
    conversation, turns = Conversation(rng), []
    for _ in range(num_turns):
        conversation.messages.append(conversation.draw_message(REQUEST_TOKENS))
        turns.append(conversation.answer(system=[*conversation.system, *conversation.draw(TIME_TOKENS)]))
    return turns


def edit(rng: Random, num_turns: int) -> list[Turn]:
    """Return a conversation in which every tenth turn edits the request of eight turns before, and goes on there."""
    conversation, turns = Conversation(rng), []
    for number in range(1, num_turns + 1):
        if number % 10 == 0:
            del conversation.messages[-16:]
        turns.append(conversation.ask())
    return turns


def retry(rng: Random, num_turns: int) -> list[Turn]:
    """Return a conversation in which every third answer is asked for again."""
    conversation, turns = Conversation(rng), []
    for number in range(1, num_turns + 1):
        if number % 3 == 0:
            del conversation.messages[-1]
            turns.append(conversation.answer())
        else:
            turns.append(conversation.ask())
    return turns


KINDS: Mapping[str, Callable[[Random, int], list[Turn]]] = {
    "grows": grow,
    "time in the last message": drift,
    "time in the system message": stamp,
    "edited": edit,
    "answers again": retry,
}
