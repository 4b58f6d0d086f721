"""Asks the questions of suites under several strategies, as requests to one engine, and scores the answers.

The strategies answer a question at the same time, as rows of one batch, greedily. A question follows when the one
before is answered, so that a strategy which shares prefixes finds the context again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from cache_strategies.registry import DeclaredInstance
from config.errors import SettingsError
from server.api.openai.tools.message_format import MessageFormat
from server.engine.build import Engine
from server.evaluation.suites.prompts import PromptWriter, SuitePrompt
from server.evaluation.suites.task import SuiteTask, TaskSample
from server.llm import LLM, GenerationError, TokenStream
from server.text.encoder import Encoder
from server.text.errors import TextRefused


@dataclass
class TaskScores:
    """The scores of a task: of each strategy, one for each sample, in the same order."""

    task: SuiteTask
    by_strategy: Mapping[str, list[float]]
    tokens: list[int] = field(default_factory=list)  # of the longest prompt of each sample

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
            for number in range(self.samples):  # by turns, so that an end before the last sample ends all tasks alike
                for each in scores:
                    self._run_sample(each, number, sizes[each.task.name])
                    on_sample(each.task.name)
        except KeyboardInterrupt:
            pass
        except (GenerationError, TextRefused) as error:
            raise SettingsError(f"--suite: {error}") from error
        return scores

    def _run_sample(self, scores: TaskScores, number: int, size: int) -> None:
        """Add the scores of a sample under each strategy, or none if it is interrupted."""
        task = scores.task
        sample = self._writer.draw_fitting(task, self.seed, number, size)
        prompts = self._writer.write(sample, task.asking)
        answers = [self._ask(sample, prompt, list(scores.by_strategy)) for prompt in prompts]
        found = {
            name: fmean(
                task.score(answer[name], prompt.turn.answers) for answer, prompt in zip(answers, prompts, strict=True)
            )
            for name in scores.by_strategy
        }
        scores.tokens.append(max(len(prompt.ids) for prompt in prompts))
        for name, score in found.items():
            scores.by_strategy[name].append(score)

    def _ask(self, sample: TaskSample, prompt: SuitePrompt, names: Sequence[str]) -> dict[str, str]:
        """Return each strategy's answer to a prompt."""
        grammar = self._writer.make_grammar(sample, prompt)
        streams: dict[str, TokenStream] = {}
        try:
            for name in names:
                streams[name] = self._llm.stream(
                    prompt.ids,
                    max_tokens=sample.max_tokens,
                    kv_cache=name,
                    structured_outputs=None if grammar is None else {"grammar": grammar},
                    temperature=0,
                )
            completions = {name: stream.complete() for name, stream in streams.items()}
        finally:
            for stream in streams.values():
                stream.close()
        return {
            name: self._writer.read_answer(sample, prompt, each.token_ids, each.text)
            for name, each in completions.items()
        }


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
