"""Suites on a real model: it solves some tasks, random eviction is found out, and two seeds do not contradict."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from server.cli.main import main
from tests.real.model_files import find_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]
RANDOM, INT8 = "compressed:scorer=random,budget=0.25", "paged:k_dtype=int8,v_dtype=int8"
TASKS = ("niah_single_1", "tool_calls_50", "completion")
SAMPLES = 26
SOLVED = 0.8
SURELY_SOLVED = ("niah_single_1", "completion")


def run(seed: str, file: Path, *flags: str) -> dict[str, Any]:
    """Return the tasks of a run on the 0.5B model, by name."""
    given = [part for task in TASKS for part in ("--suite", task)]
    given += [part for strategy in (RANDOM, INT8) for part in ("--strategy", strategy)]
    sizes = ("--length", "1024", "--samples", str(SAMPLES), "--texts", "1", "--records", "0")
    model = ("--model", str(find_model("qwen-0.5b")))
    assert main(["evaluate", *model, *sizes, *given, "--seed", seed, "--json", str(file), *flags]) == 0
    return {task["name"]: task for task in json.loads(file.read_text())["suites"]["tasks"]}


def test_verdicts_are_right_and_those_of_two_seeds_agree(tmp_path: Path, rng: random.Random) -> None:
    runs = [run(str(rng.random()), tmp_path / f"{i}.json") for i in range(2)]
    for tasks in runs:
        for name, task in tasks.items():
            exact = task["scores"]["exact_caching"]
            print(name, sum(exact) / SAMPLES, {key: each["verdict"] for key, each in task["comparisons"].items()})
            if name in SURELY_SOLVED:
                assert sum(exact) >= SOLVED * SAMPLES, name
            if sum(exact) >= SOLVED * SAMPLES:
                forgetting, rounding = task["comparisons"].values()
                assert forgetting["verdict"] == "worse", name
                assert rounding["verdict"] in ("same", "not decided"), name
    for name in TASKS:
        first, second = (tasks[name]["comparisons"] for tasks in runs)
        for strategy in first:
            assert {first[strategy]["verdict"], second[strategy]["verdict"]} != {"same", "worse"}, (name, strategy)
