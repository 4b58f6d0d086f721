"""Runs of suites with the embedded model: verdicts where they are certain, controls, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.errors import SettingsError
from config.settings import load_settings
from server.cli.main import main
from server.engine.build import Engine, build_engine
from server.evaluation.suites.paired import SuiteVerdict, compare_pairs
from server.evaluation.suites.registry import SUITES, TASKS
from server.evaluation.suites.runner import SuiteRunner, TaskScores, find_grid
from server.evaluation.suites.task import Asking, SuiteTask, TaskSample, Turn, match_all
from server.evaluation.suites.tool_calls import ERRANDS
from tests.end_to_end.tool_model import write_tool_model

STRATEGIES = {
    "exact": {"kind": "paged"},
    "also_exact": {"kind": "contiguous"},
    "window": {"kind": "sliding_window", "window": 64},
    "random": {"kind": "compressed", "scorer": "random", "budget": 64, "every": 128},
}
DAY = " The little dog ran to the park. A boy saw a big red ball. His mom gave him a hug. They played all day."
PEOPLE, THINGS = ("Hilda", "Bruno", "Greta", "Oscar"), ("violin", "kettle", "lantern", "mirror")
PLACES = ("tower", "kitchen", "garden", "cellar")
SAMPLES = 30
SMALL = ("--length", "1024", "--texts", "1", "--records", "0", "--threads", "1", "--dtype", "float32")


def draw_fact(rng: random.Random, size: int, length: int) -> TaskSample:
    """Return what the embedded model can do: a fact, a long story, and two questions."""
    person, thing, place = rng.choice(PEOPLE), rng.choice(THINGS), rng.choice(PLACES)
    fact = f"{person} put the silver {thing} in the {place}."
    question = f"\nWhere does {person} keep the silver {thing}? {person} keeps the silver {thing} in the"
    return TaskSample(fact + size * DAY, [Turn(question, [place])] * 2, max_tokens=2, is_chat=False)


FACT = SuiteTask("fact", draw_fact, match_all, least=1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    flags = {"model": "tiny", "dtype": "float32", "max_seq_len": 512, "threads": 1, "max_num_seqs": 4}
    return build_engine(load_settings(None, flags | {"strategies": STRATEGIES}))


def make_runner(engine: Engine, *tasks: SuiteTask, samples: int = SAMPLES, query_aware: bool = False) -> SuiteRunner:
    return SuiteRunner(engine, [*STRATEGIES], tasks, samples=samples, seed="1", query_aware=query_aware)


@pytest.mark.parametrize(("asking", "query_aware"), [(Asking.TURNS, False), (Asking.REQUESTS, True)])
def test_what_forgets_is_worse_and_what_is_exact_is_the_same(engine: Engine, asking: Asking, query_aware: bool) -> None:
    [scores] = make_runner(engine, replace(FACT, asking=asking), query_aware=query_aware).run()
    assert scores.count == SAMPLES
    assert all(256 < tokens <= 510 for tokens in scores.tokens)
    exact = scores.by_strategy["exact"]
    verdicts = {name: compare_pairs(exact, each, 0.1).verdict for name, each in scores.by_strategy.items()}
    same, worse = SuiteVerdict.SAME, SuiteVerdict.WORSE
    assert verdicts == {"exact": same, "also_exact": same, "window": worse, "random": worse}


def test_ctrl_c_keeps_whole_samples(engine: Engine) -> None:
    done: list[str] = []

    def interrupt(name: str) -> None:
        done.append(name)
        if len(done) == 3:
            raise KeyboardInterrupt

    first, second = make_runner(engine, FACT, replace(FACT, name="again"), samples=9).run(interrupt)
    assert done == ["fact", "again", "fact"]
    assert [counts(first), counts(second)] == [[2] * 5, [1] * 5]


def counts(scores: TaskScores) -> list[int]:
    return [scores.count, *(len(each) for each in scores.by_strategy.values())]


def test_a_call_is_required_by_the_grammar_of_the_models_family(tmp_path: Path) -> None:
    """This model would call a tool of another name, and writes arguments of that."""
    answers: list[str] = []

    def keep(answer: str, right: Sequence[str]) -> float:
        answers.append(answer)
        return 0.0

    flags = {"model": str(write_tool_model(tmp_path / "tools")), "max_seq_len": 4096, "threads": 1, "max_num_seqs": 1}
    engine = build_engine(load_settings(None, flags))
    task = replace(TASKS["tool_calls_10"], score=keep, most=4)
    [scores] = SuiteRunner(engine, ["paged"], [task], samples=2, seed="1", query_aware=False).run()
    assert scores.count == 2
    names = [re.findall(r'^{"name": "(.*)", "arguments": {', answer) for answer in answers]
    assert all(set(found) <= {errand.tool for errand in ERRANDS} and len(found) == 1 for found in names), answers


def test_contexts_end_where_all_strategies_drop_keys(engine: Engine) -> None:
    declared = [each for each in engine.instances if each.name in STRATEGIES]
    assert find_grid(declared, 1024) == 128
    assert find_grid(declared[:2], 1024) == 1
    with pytest.raises(SettingsError, match=r"--length: should be at least 256, .* `every` of random \(128\)"):
        find_grid(declared, 255)


# ---------------------------------------------------------------- the command
def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["evaluate", *SMALL, "--strategy", "sliding_window:window=64", *arguments])
    return (code, *capsys.readouterr())


def test_the_command_reports_every_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the embedded model, which only tells stories, is no judge of strategies."""
    file = tmp_path / "report.json"
    flags = (
        "--length",
        "1280",
        "--samples",
        "1",
        "--suite",
        "all",
        "--margin",
        "5",
        "--seed",
        "7",
        "--json",
        str(file),
    )
    code, out, _ = run(capsys, *flags)
    assert code == 0
    suites = json.loads(file.read_text())["suites"]
    assert [task["name"] for task in suites["tasks"]] == SUITES["all"]
    assert (suites["length"], suites["margin"], suites["seed"], suites["query_aware"]) == (1280, 0.05, "7", False)
    name = "sliding_window-window64"
    assert suites["strategies"] == ["exact_caching", name]
    for task in suites["tasks"]:
        assert {*map(len, (task["tokens"], *task["scores"].values()))} == {1}
        comparison = task["comparisons"][name]
        assert comparison["difference"]["low"] <= comparison["difference"]["value"] <= comparison["difference"]["high"]
        assert comparison["verdict"] == "too hard for this model"
    documents, table, explained = out.split("\n\n")
    assert documents.startswith("| strategy ")
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == SUITES["all"]
    assert "worse by at most 5 points" in explained
    assert explained.splitlines()[-1] == f"{name}, tasks: 19 too hard for this model"


def test_ctrl_c_reports_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scored: list[str] = []

    def interrupt(answer: str, right: Sequence[str]) -> float:
        scored.append(answer)
        if len(scored) > 4:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setitem(TASKS, "completion", replace(TASKS["completion"], score=interrupt))
    file = tmp_path / "report.json"
    code, out, _ = run(capsys, "--suite", "completion", "--samples", "9", "--json", str(file))
    assert code == 130
    [task] = json.loads(file.read_text())["suites"]["tasks"]
    assert len(task["tokens"]) == 2
    assert "| completion |       2 |" in out
    assert "not decided before about 26 samples" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--suite", "rular"], "--suite: there is no suite or task 'rular'; did you mean ruler?"),
        (["--length", "512", "--suite", "ruler"], "--length: too short for niah_multikey_3 ("),
        (["--length", "9999", "--suite", "ruler"], "--length: should be at most 2048"),
        (["--strategy", "compressed:every=600", "--suite", "vt"], "--length: should be at least 1,200"),
        (["--suite", "vt", "--margin", "100"], "'100' is not a number above 0 and below 100"),
    ],
)
def test_what_cannot_be_measured_is_reported_before_the_work(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    try:
        code, out, err = run(capsys, *flags)
    except SystemExit as end:
        code, (out, err) = int(str(end.code)), capsys.readouterr()
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_quick_runs_four_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def stop(self: SuiteRunner, *_: object) -> list[TaskScores]:
        seen.update(names=[task.name for task in self.tasks], samples=self.samples)
        return []

    monkeypatch.setattr(SuiteRunner, "run", stop)
    assert main(["evaluate", "--quick", "--threads", "1"]) == 130
    assert seen == {"names": SUITES["quick"], "samples": 26}
