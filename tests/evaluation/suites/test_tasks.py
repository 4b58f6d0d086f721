"""The generators beside the published definitions: an oracle that reads only the text is right, a guess is not."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from statistics import fmean
from uuid import UUID

import pytest

from config.errors import SettingsError
from server.evaluation.suites.registry import SUITES, TASKS, select_tasks
from server.evaluation.suites.task import TaskSample, match_all, match_first_number
from tests.evaluation.suites import solvers

LENGTHS = (1024, 8192)
SIZE = 300  # of a sample, if the task allows it


def draw(name: str, rng: random.Random, size: int = SIZE, length: int = 8192) -> TaskSample:
    return TASKS[name].draw(rng, max(TASKS[name].least, min(size, TASKS[name].most)), length)


def test_there_are_nineteen_tasks() -> None:
    assert {name: len(tasks) for name, tasks in SUITES.items()} == {
        "all": 19,
        "ruler": 6,
        "scbench": 8,
        "tool_calls": 3,
        "quick": 4,
    }
    names = [task.name for task in select_tasks(["vt", "ruler", "quick"])]
    assert names == ["vt", *(name for name in SUITES["ruler"] if name != "vt"), *SUITES["quick"][1:]]
    with pytest.raises(SettingsError, match=r"no suite or task 'rular'; did you mean ruler\?; suites: all, ruler"):
        select_tasks(["rular"])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", TASKS)
def test_an_oracle_is_right_and_the_answers_of_others_are_wrong(name: str, length: int, rng: random.Random) -> None:
    task, guessed = TASKS[name], []
    for size in (task.least, *(rng.randint(task.least, min(task.most, SIZE)) for _ in range(5))):
        sample, other = draw(name, rng, size, length), draw(name, rng, size, length)
        answers = solvers.answer(name, sample)
        assert [task.score(*each) for each in zip(answers, right(sample), strict=True)] == [1.0] * len(sample.turns)
        guessed += [task.score(*each) for each in zip(answers, right(other), strict=True)]
        assert [task.score("", each) for each in right(sample)] == [0.0] * len(sample.turns)
    assert fmean(guessed) < 0.3


def right(sample: TaskSample) -> list[list[str]]:
    return [[*turn.answers] for turn in sample.turns]


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_draws_the_same_sample_again(name: str, rng: random.Random) -> None:
    seed = rng.random()
    assert draw(name, random.Random(seed)) == draw(name, random.Random(seed))
    assert draw(name, random.Random(seed)) != draw(name, random.Random(seed + 1))


# ---------------------------------------------------------------- RULER
def test_a_needle_is_one_line_of_noise_more(rng: random.Random) -> None:
    sample = draw("niah_single_1", rng)
    intro, *lines = sample.context.splitlines()
    assert intro == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards."
    )
    assert Counter(lines)[solvers.NOISE] == SIZE == len(lines) - 1
    [(key, value)] = solvers.find_needles(sample.context)
    assert re.fullmatch(r"[a-z]+-[a-z]+", key)
    assert 10**6 <= int(value) < 10**7
    [turn] = sample.turns
    assert turn.question == f"\nWhat is the special magic number for {key} mentioned in the provided text?"
    assert turn.lead == f"The special magic number for {key} mentioned in the provided text is"
    assert sample.max_tokens == 128


@pytest.mark.parametrize("name", ["niah_multikey_2", "niah_multikey_3"])
def test_the_haystack_is_of_needles_with_keys_of_their_own(name: str, rng: random.Random) -> None:
    needles = solvers.find_needles(draw(name, rng).context)
    assert len({key for key, _ in needles}) == len(needles) == SIZE + 1
    if name == "niah_multikey_3":
        assert all(str(UUID(text)) == text and UUID(text).version == 4 for needle in needles for text in needle)


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "vt"])
def test_needles_stand_anywhere(name: str, rng: random.Random) -> None:
    places = []
    for _ in range(60):
        sample = draw(name, rng, 20)
        answer = sample.turns[0].answers[0]
        places.append(sample.context.rindex(answer) / len(sample.context))
    assert min(places) < 0.4
    assert max(places) > 0.6


def test_a_chain_has_four_hops_after_an_example_with_shorter_names(rng: random.Random) -> None:
    sample = draw("vt", rng)
    _, example, asked = sample.context.split("Memorize and track the chain(s)")
    values = solvers.run_assignments(asked)
    assert len(values) == 5
    assert len({*values.values()}) == 1
    assert all(len(name) == 5 for name in values)
    assert Counter(asked.splitlines())[solvers.NOISE] == SIZE
    shown = solvers.run_assignments(example)
    assert example.strip().endswith(
        f"5 variables are assigned the value {shown.popitem()[1]}, they are: {list_names(example)}"
    )
    assert sample.max_tokens == 30


def list_names(example: str) -> str:
    return " ".join(solvers.run_assignments(example))


@pytest.mark.parametrize(("length", "common", "other"), [(1024, 6, 1), (4096, 30, 3)])
def test_common_words_are_repeated_as_often_as_published(
    length: int, common: int, other: int, rng: random.Random
) -> None:
    counts = solvers.count_listed_words(draw("cwe", rng, 100, length).context)
    assert sorted(counts.values()) == [other] * 90 + [common] * 10


def test_coded_words_follow_the_zeta_distribution(rng: random.Random) -> None:
    size, length = 4000, 8192
    counts = solvers.count_coded_words(draw("fwe", rng, size, length).context)
    assert counts.most_common(1)[0][0] == "..."
    zeta = sum(rank**-2 for rank in range(1, 200_000)) + 1 / 200_000
    expected = [int(size * rank**-2 / zeta) for rank in range(1, length // 50 + 1)]
    assert sorted(counts.values(), reverse=True) == [count for count in expected if count]
    assert all(re.fullmatch("[a-z]{6}", word) for word in counts if word != "...")


def test_answers_are_matched_as_ruler_does() -> None:
    assert match_all("abc, DEF", ["ABC", "def", "x", "y"]) == 0.5
    assert match_first_number("The number is 42, not 7.", ["42"]) == 1
    assert match_first_number("The number is 4.5.", ["4"]) == match_first_number("None.", ["4"]) == 0


# ---------------------------------------------------------------- the others
@pytest.mark.parametrize("depth", [10, 50, 90])
def test_the_fact_of_a_call_is_at_its_depth(depth: int, rng: random.Random) -> None:
    sample = draw(f"tool_calls_{depth}", rng)
    value = re.findall(r"\d{7}", sample.turns[0].answers[0])[0]
    texts = [message["content"] for message in sample.earlier]
    [place] = [i for i, text in enumerate(texts) if value in text]
    assert math.isclose(place / len(texts), depth / 100, abs_tol=0.02)
    roles = [message["role"] for message in sample.earlier]
    assert roles == ["user", "assistant", "tool", "assistant", *["user", "assistant"] * (SIZE + 1)]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"name": "f", "arguments": {"a": "1", "b": 2}}', 1),
        ('I call {"arguments": {"b": 2, "a": "1"}, "name": "f"} now.', 1),
        ('{"name": "g", "arguments": {"a": "1", "b": 2}}', 0),
        ('{"name": "f", "arguments": {"a": 1, "b": 2}}', 0),
        ('{"name": "f", "arguments": {"a": "1"}}', 0),
        ('{"name": "f", "arguments": {"a": "1", "b": 2', 0),
        ("no", 0),
    ],
)
def test_a_call_needs_name_and_arguments(answer: str, score: float) -> None:
    assert TASKS["tool_calls_10"].score(answer, ['{"name": "f", "arguments": {"a": "1", "b": 2}}']) == score


def test_a_wrong_step_costs_a_step_and_a_left_out_one_all_that_follow() -> None:
    score = TASKS["arithmetic"].score
    assert score(" = 15\n15 + 4 = 20\n19 + 1 = 20", ["15", "19", "20"]) == pytest.approx(2 / 3)
    assert score(" = 15\n19 + 1 = 20", ["15", "19", "20"]) == pytest.approx(1 / 3)
