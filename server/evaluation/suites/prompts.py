"""Samples become prompts as token ids, by the model's chat template if it has one, of at most a given length.

Question and context are apart: without `query_aware`, the context ends at a multiple of `grid`, which is where
strategies such as `compressed` drop keys, so that they choose before they see a question; with it, the question ends
there. Line feeds before the question fill the gap. Knows neither strategies nor the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import cycle, islice
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

from server.api.openai.tools.message_format import MessageFormat, MessageParsing
from server.evaluation.suites.task import Asking, Message, SuiteTask, TaskSample, Turn
from server.evaluation.suites.tool_calls import describe_tools, draw_conversation
from server.text.encoder import Encoder
from server.text.errors import ChatTemplateError
from server.text.tool_parsers.message_grammar import MessageOutline

MARK = "[[the question begins here]]"  # between the context and the first question, until they are apart


class SuitePrompt(NamedTuple):
    """The prompt of one question."""

    ids: Sequence[int]
    text: str
    turn: Turn


class PromptWriter:
    """Writes prompts of at most `length` tokens, answers included, for one model."""

    def __init__(
        self,
        encoder: Encoder,
        format: MessageFormat,
        *,
        length: int,
        grid: int = 1,
        query_aware: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Write for a model whose chat template gets these variables, such as enable_thinking."""
        self._encoder, self._format, self._variables = encoder, format, variables
        self._length, self._grid, self._query_aware = length, grid, query_aware

    def find_too_long(self, tasks: Sequence[SuiteTask], seed: str, count: int) -> dict[str, int]:
        """Return the tasks whose smallest samples do not fit, with the length that they need."""
        needed = {
            task.name: max(self._measure(self._draw(task, seed, i, task.least), task.asking) for i in range(count))
            for task in tasks
        }
        return {name: tokens for name, tokens in needed.items() if tokens > self._length}

    def find_size(self, task: SuiteTask, seed: str) -> int:
        """Return the largest size at which a task's first sample fits."""

        def fits(size: int) -> bool:
            return self._measure(self._draw(task, seed, 0, size), task.asking) <= self._length

        low, high = task.least, min(2 * task.least, task.most)
        while high < task.most and fits(high):
            low, high = high, min(2 * high, task.most)
        if fits(high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def draw_fitting(self, task: SuiteTask, seed: str, number: int, size: int) -> TaskSample:
        """Return a sample of the largest size from `size` down that fits, in steps of a sixteenth."""
        while True:
            sample = self._draw(task, seed, number, size)
            if size <= task.least or self._measure(sample, task.asking) <= self._length:
                return sample
            size = max(task.least, size - max(1, size // 16))

    def _draw(self, task: SuiteTask, seed: str, number: int, size: int) -> TaskSample:
        sample = task.draw(Random(f"{seed}/{task.name}/{number}"), size, self._length)
        return sample if self.writes_calls or not sample.tools else describe_tools(sample)

    def _measure(self, sample: TaskSample, asking: Asking) -> int:
        """Return the most tokens of a prompt and its answer."""
        return max(len(prompt.ids) for prompt in self.write(sample, asking)) + sample.max_tokens

    @cached_property
    def writes_calls(self) -> bool:
        """Whether the model's template takes tools, and its way to write calls is known."""
        sample = draw_conversation(Random(0), 1, self._length, depth=50)
        try:
            self._render(sample.earlier, sample.tools)
        except ChatTemplateError:
            return False
        return self._format.tools is not None

    # ------------------------------------------------------------ prompts
    def write(self, sample: TaskSample, asking: Asking) -> list[SuitePrompt]:
        """Return the prompts of the sample's questions, in their order."""
        before = [sample.turns[:i] if asking is Asking.TURNS else () for i in range(len(sample.turns))]
        return [self._write_turn(sample, *each) for each in zip(before, sample.turns, strict=True)]

    def _write_turn(self, sample: TaskSample, before: Sequence[Turn], turn: Turn) -> SuitePrompt:
        first, *others = (*before, turn)
        messages = [*sample.earlier, {"role": "user", "content": sample.context + MARK + first.question}]
        for previous, following in zip(before, others, strict=True):
            messages += [
                {"role": "assistant", "content": previous.right_answer},
                {"role": "user", "content": following.question.strip()},
            ]
        is_chat = sample.is_chat and self._encoder.chat_template.source is not None
        text = self._render(messages, sample.tools) if is_chat else _write_plain(messages)
        lead = turn.lead if is_chat or not turn.lead else f" {turn.lead}"
        context, _, question = (text + lead).partition(MARK)
        begin = [] if is_chat else self._encoder.outer_tokens[0]
        head = [*begin, *self._encoder.encode(context, add_special_tokens=False)]
        tail, filler = self._encoder.encode_continuations([question, "\n"])
        missing = -(len(head) + self._query_aware * len(tail)) % self._grid
        return SuitePrompt([*head, *islice(cycle(filler), missing), *tail], text, turn)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        return self._encoder.chat_template.render_strict(messages, tools=[*tools] or None, **self._variables)

    # ------------------------------------------------------------ calls of tools
    def make_grammar(self, sample: TaskSample, prompt: SuitePrompt) -> str | None:
        """Return the grammar of a required call, as for a request with tools; None if any text may follow."""
        if not sample.tools:
            return None
        reasoning = self._format.find_reasoning_state(prompt.text)
        return self._format.make_grammar(MessageOutline("calls", _get_schemas(sample), False, reasoning))

    def read_answer(self, sample: TaskSample, prompt: SuitePrompt, ids: Sequence[int], text: str) -> str:
        """Return what is scored: the first call as JSON if the model has tools, otherwise the text."""
        if not sample.tools:
            return text
        parsing = MessageParsing(self._format, _get_schemas(sample), parallel=False, calls_only=True)
        parser = parsing.make_parser(prompt.text)
        written = parsing.vocabulary.decode(ids)
        calls = [*parser.push(written).tool_calls, *parser.finish().tool_calls]
        arguments = "".join(call.arguments for call in calls)
        return f'{{"name": "{calls[0].name}", "arguments": {arguments}}}' if calls else ""


def _get_schemas(sample: TaskSample) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools}


def _write_plain(messages: Sequence[Message]) -> str:
    """Return messages as plain text; questions about one text have no roles, as in RULER and SCBench."""
    if MARK in messages[0]["content"]:
        return "\n\n".join(message["content"] for message in messages)
    return "".join(f"{message['role'].title()}: {message['content']}\n\n" for message in messages) + "Assistant:"
