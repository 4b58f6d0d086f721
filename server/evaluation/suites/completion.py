"""Completion across a file: a constant from the beginning of a Python file is asserted at its end."""

from __future__ import annotations

from random import Random

from server.evaluation.suites.task import SuiteTask, TaskSample, Turn, match_first_number
from server.evaluation.suites.words import draw_words

NUM_CONSTANTS = 6
SUFFIXES = ("LIMIT", "TIMEOUT", "SIZE", "COUNT")


def draw_file(rng: Random, size: int, length: int) -> TaskSample:
    """Return a module of constants and `size` functions, which ends within a test of one of the constants."""
    words = draw_words(rng, NUM_CONSTANTS + 4)
    constants = {f"{word.upper()}_{rng.choice(SUFFIXES)}": rng.randint(1000, 9999) for word in words[:NUM_CONSTANTS]}
    lines = [f'"""Settings and functions of the {words[-1]}."""\n']
    lines += [f"{name} = {value}" for name, value in constants.items()]
    lines += [_write_function(rng) for _ in range(size)]
    name = rng.choice([*constants])
    test = f"\n\n\ndef test_{name.lower()}():\n    assert {name} =="
    return TaskSample("\n".join(lines), [Turn(test, [str(constants[name])])], max_tokens=8, is_chat=False)


def _write_function(rng: Random) -> str:
    verb, noun, first, second = draw_words(rng, 4)
    return (
        f"\n\ndef {verb}_{noun}({first}, {second}):\n"
        f'    """Return the {noun} of {first} and {second}."""\n'
        f"    return {rng.randint(2, 99)} * {first} + {second} - {rng.randint(2, 99)}"
    )


COMPLETION = SuiteTask("completion", draw_file, match_first_number, least=3)
