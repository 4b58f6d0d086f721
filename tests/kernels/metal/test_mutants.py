"""Every mutant of a Metal kernel is caught, and an equivalent kernel is not."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from kernels.metal.source import FOLDER, assemble_source
from metal_emulator.tokens import Source, Token
from tests.kernels.metal.mutants import MUTANTS, SURVIVES, markdown
from tests.kernels.metal.mutation_testing import KERNELS, Kind, caught, try_mutant, workers
from tests.kernels.metal.source_pattern import change_once

TABLE = Path(__file__).with_name("mutants.md")

# One of each kind, and by what it should be caught.
QUICK = {
    ("rms_norm", Kind.DROPPED): "checker: data race on 'sums'",
    ("prefill", Kind.MEMORY): "checker: data race on 'numbers'",
    ("add_rms_norm", Kind.BRANCH): "checker: divergence",
    ("rope", Kind.INDEX): "off by",
    ("linear", Kind.BOUND): "checker: out of bounds on 'out'",
    ("write_kv", Kind.WRITERS): "checker: data race on 'memory'",
    ("write_kv", Kind.LOGIC): "off by",
}


# Words of the language that look like a variable's name.
METAL = set(
    re.findall(
        r"\w+",
        """
        bool break char const constant constexpr continue device else false float float2 half if inline int int2 kernel
        long metal mem_flags namespace nullptr return size_t static struct template thread threadgroup true typedef
        typename uchar uint uint2 uint3 uint4 ushort using void
        """,
    )
)


def unchanged(text: str) -> str:
    return text


def renamed(text: str) -> str:
    """Return the source with another name for every variable and every field."""
    tokens = [Token("", 0, 0), Token("", 0, 0), *Source(text).tokens, Token("", len(text), len(text))]
    words = [
        (before, token, after)
        for earlier, before, token, after in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False)
        if token.text[:1].islower()
        and after.text not in ("(", "::")
        and before.text != "::"
        and not earlier.text == before.text == "["  # an attribute
        and not (before.text == "." and token.text in "xyzw")
    ]
    variables = {token.text for _, token, after in words if after.text != "<"} - METAL
    for _, token, _ in reversed(words):
        if token.text in variables:
            text = f"{text[: token.start]}other_{text[token.start :]}"
    return text


def code(text: str) -> list[str]:
    return [token.text for token in Source(text).tokens]


def test_every_kernel_has_mutants_that_change_it() -> None:
    texts = {file: assemble_source(file, {}) for file, *_ in KERNELS.values()}
    there = {name for path in FOLDER.glob("*.metal") for name in re.findall(r"kernel void (\w+)\(", path.read_text())}
    assert {mutant.kernel for mutant in MUTANTS} == set(KERNELS) == there
    for mutant in MUTANTS:
        text = texts[KERNELS[mutant.kernel][0]]
        assert mutant.applied(text) != text, mutant
    assert len({mutant[:3] for mutant in MUTANTS}) == len(MUTANTS), "two mutants have the same name"


def test_mutants_do_not_depend_on_the_names_of_variables() -> None:
    texts = {file: assemble_source(file, {}) for file, *_ in KERNELS.values()}
    for mutant in MUTANTS:
        text = texts[KERNELS[mutant.kernel][0]]
        assert code(mutant.applied(renamed(text))) == code(renamed(mutant.applied(text))), mutant


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_with_other_names_is_still_right(kernel: str) -> None:
    assert renamed(assemble_source(KERNELS[kernel][0], {})) != assemble_source(KERNELS[kernel][0], {})
    assert caught(kernel, torch.float32, renamed) is None


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ("$a «+→-» $b", "float f(float x, float y) { return x  -  y; }"),
        ("float $b) ... «$a→$b» +", "float f(float x, float y) { return y + y; }"),
        ("return «→2 * »$a", "float f(float x, float y) { return 2 * x + y; }"),
    ],
)
def test_a_change_is_made_where_its_pattern_matches(change: str, result: str) -> None:
    text = "float f(float x, float y) { return x /* and */ + y; }"
    assert code(change_once(text, "f", change)) == code(result)


@pytest.mark.parametrize("change", ["«$a→1» + $a", "float «$a→b»", "«z→1»"])
def test_a_change_without_a_single_place_is_refused(change: str) -> None:
    with pytest.raises(AssertionError, match="places for the change"):
        change_once("float f(float x, float y) { return x + y; }", "f", change)


def test_a_mutant_of_each_kind_is_caught_by_what_should_catch_it() -> None:
    assert {kind for _, kind in QUICK} == set(Kind)
    chosen = [next(m for m in MUTANTS if (m.kernel, m.kind) == each) for each in QUICK]
    with workers() as pool:
        told = list(pool.map(try_mutant, chosen))
    for mutant, by, expected in zip(chosen, told, QUICK.values(), strict=True):
        assert by is not None, mutant
        assert by.startswith(expected), (mutant, by)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_is_no_mutant_is_not_caught() -> None:
    with workers() as pool:
        for dtype in (torch.float32, torch.bfloat16):
            told = pool.map(partial(caught, dtype=dtype, change=unchanged), KERNELS)
            assert dict(zip(KERNELS, told, strict=True)) == dict.fromkeys(KERNELS), dtype


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_mutants_are_caught_as_the_table_says() -> None:
    table = markdown()
    assert SURVIVES not in table
    assert TABLE.read_text(encoding="utf-8") == f"{table}\n", "write what mutants.py prints"
