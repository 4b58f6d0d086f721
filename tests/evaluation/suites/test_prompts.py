"""Prompts of samples: they fit a length, contexts end where keys are dropped, and calls are read as the server does."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from server.api.openai.tools.message_format import MessageFormat
from server.evaluation.suites.prompts import PromptWriter, SuitePrompt
from server.evaluation.suites.registry import TASKS
from server.evaluation.suites.task import Asking, Message, SuiteTask, TaskSample
from server.text.chat.template import ChatTemplate
from server.text.encoder import Encoder
from tests.evaluation.suites import solvers

TINY = Path(__file__).parents[3] / "server/models/tiny"
TEMPLATES = Path(__file__).parents[2] / "text/templates/tools"
FAMILIES = ("qwen25", "qwen3", "mistral_nemo", "gpt_oss", "kimi_k2", "granite33")
LENGTH, GRID = 2048, 256
SEED = "a seed"


def make_writer(
    template: str | None = None, *, length: int = LENGTH, grid: int = GRID, query_aware: bool = False
) -> PromptWriter:
    source = None if template is None else (TEMPLATES / f"{template}.jinja").read_text()
    chat = ChatTemplate({} if source is None else {"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    encoder = Encoder(Encoder.from_directory(TINY).backend, chat)
    format = MessageFormat.choose(encoder.vocabulary, "auto", "auto")
    return PromptWriter(encoder, format, length=length, grid=grid, query_aware=query_aware)


def decode(ids: Sequence[int]) -> str:
    return Encoder.from_directory(TINY).vocabulary.decode(ids, skip_special_tokens=False)


def draw(
    writer: PromptWriter, task: SuiteTask, seed: str = SEED, number: int = 0
) -> tuple[TaskSample, list[SuitePrompt]]:
    sample = writer.draw_fitting(task, seed, number, writer.find_size(task, seed))
    return sample, writer.write(sample, task.asking)


@pytest.mark.parametrize("template", [None, "qwen25"])
@pytest.mark.parametrize("name", TASKS)
def test_prompts_fill_the_length_and_have_all_that_an_oracle_needs(name: str, template: str | None) -> None:
    task, writer = TASKS[name], make_writer(template)
    assert writer.find_too_long([task], SEED, 3) == {}
    for number in range(2):
        sample, prompts = draw(writer, task, number=number)
        longest = max(len(prompt.ids) for prompt in prompts) + sample.max_tokens
        assert longest <= LENGTH
        assert longest > LENGTH - GRID - LENGTH // 8 or task.most < 100
        for prompt, right in zip(prompts, solvers.solve(name, sample), strict=True):
            assert sorted(prompt.turn.answers) == sorted(right)
            assert all(
                text in decode(prompt.ids) for text in (sample.context, prompt.turn.question.strip(), prompt.turn.lead)
            )


@pytest.mark.parametrize("name", ["niah_single_1", "scbench_mf_requests", "tool_calls_50"])
@pytest.mark.parametrize("query_aware", [False, True])
def test_contexts_or_questions_end_where_keys_are_dropped(name: str, query_aware: bool) -> None:
    _, prompts = draw(writer := make_writer("qwen25", query_aware=query_aware), TASKS[name])
    assert writer.writes_calls
    for prompt in prompts:
        if query_aware:
            assert len(prompt.ids) % GRID == 0
        else:
            before = decode(prompt.ids[: len(prompt.ids) // GRID * GRID])
            after = decode(prompt.ids[len(prompt.ids) // GRID * GRID :])
            assert prompt.turn.question.strip() in after
            assert prompt.turn.question.strip() not in before
            assert after.lstrip("\n").startswith(prompt.turn.question.strip())


def test_a_later_turn_follows_the_right_answers_and_a_request_does_not() -> None:
    for name, asking in (("scbench_kv", Asking.TURNS), ("scbench_kv_requests", Asking.REQUESTS)):
        sample, prompts = draw(make_writer("qwen25"), TASKS[name])
        first, second, third = (decode(prompt.ids) for prompt in prompts)
        values = [turn.answers[0] for turn in sample.turns]
        told = [text.count(f"assistant\n{value}<") for text in (first, second, third) for value in values]
        assert told == ([0, 0, 0, 1, 0, 0, 1, 1, 0] if asking is Asking.TURNS else [0] * 9)
        shared = first.index(sample.turns[0].question)
        assert shared > len(first) / 2
        assert first[:shared] == second[:shared] == third[:shared]


def test_seeds_and_numbers_draw_other_samples(rng: random.Random) -> None:
    writer, task = make_writer(), TASKS["niah_single_1"]
    seed = str(rng.random())
    drawn = [draw(writer, task, *each)[0] for each in ((seed, 0), (seed, 0), (seed, 1), (f"{seed}1", 0))]
    assert drawn[0] == drawn[1]
    assert len({each.context for each in drawn}) == 3


def test_tasks_that_do_not_fit_are_named_with_their_length() -> None:
    needed = make_writer(length=600, grid=1).find_too_long([TASKS["cwe"], TASKS["niah_single_1"]], SEED, 3)
    assert [*needed] == ["cwe"]
    assert make_writer(length=needed["cwe"], grid=1).find_too_long([TASKS["cwe"]], SEED, 3) == {}


# ---------------------------------------------------------------- calls of tools
@pytest.mark.parametrize("template", FAMILIES)
def test_a_call_in_a_models_own_form_is_read(template: str) -> None:
    """The template writes the right call as the model would, after the prompt."""
    writer = make_writer(template)
    sample, [prompt] = draw(writer, TASKS["tool_calls_50"])
    assert writer.writes_calls
    assert writer.make_grammar(sample, prompt) is not None
    right = json.loads(prompt.turn.answers[0])
    call = {"id": "call00002", "type": "function", "function": right}
    messages: list[Message] = [
        {"role": "user", "content": prompt.turn.question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": right["name"], "content": "END"},
    ]
    chat = ChatTemplate({"default": (TEMPLATES / f"{template}.jinja").read_text()}, {"bos_token": "", "eos_token": ""})
    rendered = chat.render_strict(messages, tools=[*sample.tools])
    written = rendered.rpartition(prompt.turn.question)[2].partition("END")[0]
    ids = Encoder.from_directory(TINY).encode(written, add_special_tokens=False)
    answer = writer.read_answer(sample, prompt, ids, written)
    assert TASKS["tool_calls_50"].score(answer, prompt.turn.answers) == 1
    assert writer.read_answer(sample, prompt, ids[:3], "") == ""


def test_a_model_without_tools_answers_with_json() -> None:
    writer = make_writer()
    sample, [prompt] = draw(writer, TASKS["tool_calls_10"])
    assert not writer.writes_calls
    assert writer.make_grammar(sample, prompt) is None
    text = decode(prompt.ids)
    assert text.count('"description": "Pay invoice."') == 1
    assert text.endswith(f'\n{prompt.turn.question}\n\nAssistant: {{"name": "')
    rest = prompt.turn.answers[0].removeprefix(prompt.turn.lead)
    assert TASKS["tool_calls_10"].score(writer.read_answer(sample, prompt, [], rest), prompt.turn.answers) == 1
