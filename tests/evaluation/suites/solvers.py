"""Solves the tasks from their texts alone, as the publications define them: an independent oracle.

A solver gets the text before a question and the question, and returns the right texts. It knows no generator.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from server.evaluation.suites.task import TaskSample

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def find_needles(context: str) -> list[tuple[str, str]]:
    """Return the keys and values of all sentences that state one."""
    return re.findall(r"^One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.$", context, re.MULTILINE)


def solve_needle(context: str, question: str) -> list[str]:
    found = re.search(r"What is the special magic (?:number|uuid) for (\S+) mentioned", question)
    assert found is not None
    return [value for key, value in find_needles(context) if key == found[1]]


def run_assignments(context: str) -> dict[str, str]:
    """Return the values of all variables; an assignment from one that has none yet is an error."""
    values: dict[str, str] = {}
    for name, variable, number in re.findall(r"^VAR ([A-Z]+) = (?:VAR ([A-Z]+)|(\d+))$", context, re.MULTILINE):
        assert name not in values
        values[name] = number or values[variable]
    return values


def solve_tracking(context: str, question: str) -> list[str]:
    found = re.search(r"assigned the value (\d+) in the text above", question)
    assert found is not None
    return [name for name, value in run_assignments(context).items() if value == found[1]]


def count_listed_words(context: str) -> Counter[str]:
    """Return how often the words of the last numbered list occur, whose numbers run from 1."""
    items = re.findall(r"(\d+)\. (\S+)", context[context.rindex("Below is a numbered list") :])
    assert [int(number) for number, _ in items] == [*range(1, len(items) + 1)]
    return Counter(word for _, word in items)


def solve_common_words(context: str, question: str) -> list[str]:
    return [word for word, _ in count_listed_words(context).most_common(10)]


def count_coded_words(context: str) -> Counter[str]:
    """Return how often each coded word occurs, the dots included."""
    return Counter(context.partition("coded words. ")[2].split())


def solve_frequent_words(context: str, question: str) -> list[str]:
    counts = count_coded_words(context)
    del counts["..."]
    return [word for word, _ in counts.most_common(3)]


def solve_pairs(context: str, question: str) -> list[str]:
    found = re.search(r'Key: "(.*)"', question)
    assert found is not None
    return [json.loads(context[context.index("{") :])[found[1]]]


def solve_affixes(context: str, question: str) -> list[str]:
    found = re.search(r'begins with "(.*)" and ends with "(.*)"', question)
    assert found is not None
    return [line for line in context.splitlines() if line.startswith(found[1]) and line.endswith(found[2])]


def solve_numbers(context: str, question: str) -> list[str]:
    numbers: list[int] = sorted(ast.literal_eval(context[context.index("[") :].strip()))
    places = {"largest": -1, "smallest": 0, "second largest": -2, "second smallest": 1, "median": len(numbers) // 2}
    found = re.search(r"What is the (.*) number of the list", question)
    assert found is not None
    return [str(numbers[places[found[1]]])]


def solve_sums(context: str, question: str) -> list[str]:
    asked = context[context.rindex("Start:") :]
    value, *steps = map(int, re.findall(r"[+-]?\d+", asked))
    results = []
    for step in steps:
        value += step
        results.append(str(value))
    return results


def solve_completion(context: str, question: str) -> list[str]:
    constants: dict[str, object] = {}
    exec(compile(context, "module.py", "exec"), constants)
    name = question.rpartition("assert ")[2].removesuffix(" ==")
    return [str(constants[name])]


TOOLS = {"parcel": "track_parcel", "invoice": "pay_invoice", "booking": "cancel_booking", "ticket": "open_ticket"}


def solve_call(context: str, question: str) -> list[str]:
    """Return the call that a request needs, by the sentence with the same name and thing."""
    found = re.search(r"(parcel|invoice|booking|ticket) \w+ (\w+)[.?]", question)
    assert found is not None
    thing, name = found.groups()
    told = re.findall(rf"{thing} \w+ {name} has the (\w+ \w+) (\d+)\. Keep it in mind", context)
    return [json.dumps({"name": TOOLS[thing], "arguments": {what.replace(" ", "_"): value}}) for what, value in told]


SOLVERS: Mapping[str, Callable[[str, str], Sequence[str]]] = {
    "niah": solve_needle,
    "vt": solve_tracking,
    "cwe": solve_common_words,
    "fwe": solve_frequent_words,
    "scbench_kv": solve_pairs,
    "scbench_prefix": solve_affixes,
    "scbench_vt": solve_tracking,
    "scbench_mf": solve_numbers,
    "arithmetic": solve_sums,
    "completion": solve_completion,
    "tool_calls": solve_call,
}


def read_context(sample: TaskSample) -> str:
    """Return all that is said before the first question."""
    return "\n".join([*(message["content"] for message in sample.earlier), sample.context])


def solve(task: str, sample: TaskSample) -> list[list[str]]:
    """Return the right texts for each question of a sample."""
    solver = next(solver for begin, solver in SOLVERS.items() if task.startswith(begin))
    return [list(solver(read_context(sample), turn.question)) for turn in sample.turns]


def answer(task: str, sample: TaskSample) -> list[str]:
    """Return an oracle's answers to the questions of a sample."""
    if task == "arithmetic":
        return [" ".join(f"= {result}" for result in right) for right in solve(task, sample)]
    return [f" {', '.join(right)}." for right in solve(task, sample)]
