"""Asks the questions of suites under several strategies, as requests to one engine, and scores the answers.

As many samples as the engine has seats for are answered at the same time, each by all strategies, as rows of one batch,
greedily. A question of a sample follows when the one before is answered, so that a strategy which shares prefixes finds
the context again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from cache_strategies.registry import DeclaredInstance
from config.errors import SettingsError
from server.api.openai.tools.message_format import MessageFormat
from server.engine.build import Engine
from server.evaluation.suites.prompts import PromptWriter, SuitePrompt
from server.evaluation.suites.task import SuiteTask, TaskSample
from server.llm import LLM, GenerationError, TokenStream
from server.text.encoder import Encoder
from server.text.errors import TextRefused


class RunningSample(NamedTuple):
    """A sample, a prompt for each of its questions, and the scores of the answers so far by strategy."""

    sample: TaskSample
    prompts: Sequence[SuitePrompt]
    scores: Mapping[str, list[float]]


@dataclass
class TaskScores:
    """The scores of a task: of each strategy, one for each sample, in the same order."""

    task: SuiteTask
    by_strategy: Mapping[str, list[float]]
    tokens: list[int] = field(default_factory=list)  # of the longest prompt of each sample

    def add(self, answered: RunningSample) -> None:
        """Add a sample of which all questions are answered: the mean score of each strategy."""
        self.tokens.append(max(len(prompt.ids) for prompt in answered.prompts))
        for name, scores in answered.scores.items():
            self.by_strategy[name].append(fmean(scores))

    @property
    def count(self) -> int:
        """Return the number of samples that all strategies have answered."""
        return len(self.tokens)


class SuiteRunner:
    """Runs samples of tasks under strategies, of which the first is exact."""

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        tasks: Sequence[SuiteTask],
        *,
        samples: int,
        seed: str,
        query_aware: bool,
    ) -> None:
        """Prepare the tasks. Raises SettingsError if the samples of some do not fit, or not the model's template."""
        settings = engine.settings
        self.names, self.tasks, self.samples, self.seed = names, tasks, samples, seed
        self._llm = LLM.from_engine(engine)
        self._seats = engine.core.scheduler.limits.max_num_seqs
        encoder = Encoder.from_directory(engine.model_dir)
        self._writer = PromptWriter(
            encoder,
            MessageFormat.choose(encoder.vocabulary, settings.tool_call_parser, settings.reasoning_parser),
            length=engine.max_seq_len,
            grid=find_grid([each for each in engine.instances if each.name in names], engine.max_seq_len),
            query_aware=query_aware,
            variables=settings.default_chat_template_kwargs,
        )
        try:
            needed = self._writer.find_too_long(tasks, seed, samples)
        except TextRefused as error:
            raise SettingsError(f"--suite: {error}") from error
        if needed:
            listed = ", ".join(f"{name} ({tokens:,} tokens)" for name, tokens in needed.items())
            raise SettingsError(
                f"--length: too short for {listed}: make it {max(needed.values()):,}, or choose other tasks by --suite"
            )

    def run(
        self, on_sample: Callable[[str], object] = lambda name: None, *, names: Sequence[str] | None = None
    ) -> list[TaskScores]:
        """Return the scores of the tasks under all strategies or those of `names`; after Ctrl-C those that there are.

        The samples are the same for any `names`. `on_sample` is called with the task's name after each sample. Raises
        SettingsError if a strategy fails.
        """
        names = self.names if names is None else names
        scores = [TaskScores(task, {name: [] for name in names}) for task in self.tasks]
        try:
            sizes = {task.name: self._writer.find_size(task, self.seed) for task in self.tasks}
            together = max(1, self._seats // len(names))
            for first in range(0, self.samples, together):  # by turns: an early end ends all tasks nearly alike
                numbers = range(first, min(first + together, self.samples))
                for each in scores:
                    self._run_samples(each, numbers, sizes[each.task.name], on_sample)
        except KeyboardInterrupt:
            pass
        except (GenerationError, TextRefused) as error:
            raise SettingsError(f"--suite: {error}") from error
        return scores

    def _run_samples(
        self, scores: TaskScores, numbers: Sequence[int], size: int, on_sample: Callable[[str], object]
    ) -> None:
        """Add the scores of samples that run at the same time, in their order, up to the first that is interrupted."""
        task, names = scores.task, list(scores.by_strategy)
        running = [self._begin(task, number, size, names) for number in numbers]
        num_turns = len(running[0].prompts)  # as many in each sample of a task
        for turn in range(num_turns):
            with ExitStack() as streams:
                asked = [self._ask(each, turn, streams) for each in running]
                for each, answers in zip(running, asked, strict=True):
                    self._score(task, each, turn, answers)
                    if turn == num_turns - 1:
                        scores.add(each)
                        on_sample(task.name)

    def _begin(self, task: SuiteTask, number: int, size: int, names: Sequence[str]) -> RunningSample:
        sample = self._writer.draw_fitting(task, self.seed, number, size)
        return RunningSample(sample, self._writer.write(sample, task.asking), {name: [] for name in names})

    def _ask(self, running: RunningSample, turn: int, streams: ExitStack) -> dict[str, TokenStream]:
        """Begin each strategy's answer to a question; `streams` closes what is not read to its end."""
        sample, prompt = running.sample, running.prompts[turn]
        grammar = self._writer.make_grammar(sample, prompt)
        answers = {}
        for name in running.scores:
            stream = self._llm.stream(
                prompt.ids,
                max_tokens=sample.max_tokens,
                kv_cache=name,
                structured_outputs=None if grammar is None else {"grammar": grammar},
                temperature=0,
            )
            answers[name] = streams.enter_context(closing(stream))
        return answers

    def _score(self, task: SuiteTask, running: RunningSample, turn: int, answers: Mapping[str, TokenStream]) -> None:
        """Wait for the answers to a question, and add their scores."""
        prompt = running.prompts[turn]
        for name, stream in answers.items():
            whole = stream.complete()
            answer = self._writer.read_answer(running.sample, prompt, whole.token_ids, whole.text)
            running.scores[name].append(task.score(answer, prompt.turn.answers))


def find_grid(instances: Sequence[DeclaredInstance], length: int) -> int:
    """Return the least number of tokens of which the boundaries of all instances are divisors.

    Raises SettingsError if no text of `length` tokens reaches it.
    """
    every = {each.name: int(getattr(each.options, "every", 1)) for each in instances}
    grid = math.lcm(*every.values())
    if 2 * grid > length:
        listed = ", ".join(f"{name} ({tokens:,})" for name, tokens in every.items() if tokens > 1)
        raise SettingsError(
            f"--length: should be at least {2 * grid:,}, as contexts end where all strategies drop keys: every "
            f"{grid:,} tokens, a multiple of the `every` of {listed}"
        )
    return grid
