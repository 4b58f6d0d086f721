"""A chain of sums, each of which begins with the result before: an error in what is generated goes on to the end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import eq
from random import Random

from server.evaluation.suites.task import SuiteTask, TaskSample, Turn

TOKENS_A_STEP = 14  # of "47 + 25 = 72" and a line feed, where each digit is a token
EXAMPLE = 4  # steps of the worked example


def draw_sums(rng: Random, size: int, length: int) -> TaskSample:
    """Return `size` steps, whose results have two digits, after a worked example."""
    (shown, shown_lines, _), (asked, lines, results) = [_draw_steps(rng, steps) for steps in (EXAMPLE, size)]
    context = (
        "Go through the steps from the first to the last. Write each on a line of its own with its result.\n\n"
        f"{shown}\n" + "\n".join(shown_lines) + f"\n\n{asked}\n"
    )
    first, *_ = lines
    turn = Turn("Write all the steps now.", results, first.partition(" =")[0])
    return TaskSample(context, [turn], max_tokens=TOKENS_A_STEP * size)


def _draw_steps(rng: Random, count: int) -> tuple[str, list[str], list[str]]:
    """Return the steps in words, the lines of a right answer, and their results."""
    first = value = rng.randint(10, 99)
    steps, lines, results = [], [], []
    for _ in range(count):
        sign, by = rng.choice([(sign, by) for sign in (1, -1) for by in range(2, 10) if 10 <= value + sign * by <= 99])
        mark = "+" if sign > 0 else "-"
        steps.append(f"{mark}{by}")
        lines.append(f"{value} {mark} {by} = {value + sign * by}")
        value += sign * by
        results.append(str(value))
    return f"Start: {first}. Steps: {', '.join(steps)}.", lines, results


def score_steps(answer: str, right: Sequence[str]) -> float:
    """Return the share of steps that have the right result at their place."""
    results = re.findall(r"=\s*(-?\d+)", answer)
    return [*map(eq, results, right)].count(True) / len(right)


ARITHMETIC = SuiteTask("arithmetic", draw_sums, score_steps, least=8, most=40)
