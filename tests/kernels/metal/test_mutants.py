"""Every mutant of a Metal kernel is caught, and a kernel that is none is not."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from kernels.metal.source import FOLDER, source
from tests.kernels.metal.mutants import MUTANTS, SURVIVES, markdown
from tests.kernels.metal.mutation_testing import KERNELS, Kind, caught, try_mutant, workers

DOC = Path(__file__).parents[3] / "docs" / "metal.md"

# One of each kind, and by what it should be caught.
QUICK = {
    ("rms_norm", Kind.DROPPED): "checker: data race on 'sums'",
    ("prefill", Kind.MEMORY): "checker: data race on 'numbers'",
    ("add_rms_norm", Kind.BRANCH): "checker: divergence",
    ("rope", Kind.INDEX): "off by",
    ("linear", Kind.BOUND): "checker: out of bounds on 'out'",
    ("write_kv", Kind.WRITERS): "checker: data race on 'memory'",
    ("quantize", Kind.LOGIC): "off by",
}


def unchanged(text: str) -> str:
    return text


def test_every_kernel_has_mutants_that_change_it() -> None:
    texts = {file: source(file, {}) for file, *_ in KERNELS.values()}
    there = {name for path in FOLDER.glob("*.metal") for name in re.findall(r"kernel void (\w+)\(", path.read_text())}
    assert {mutant.kernel for mutant in MUTANTS} == set(KERNELS) == there
    for mutant in MUTANTS:
        text = texts[KERNELS[mutant.kernel][0]]
        assert mutant.applied(text) != text, mutant
    assert len({mutant[:3] for mutant in MUTANTS}) == len(MUTANTS), "two mutants have the same name"


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
def test_all_mutants_are_caught_as_the_documentation_says() -> None:
    table = markdown()
    assert SURVIVES not in table
    told = DOC.read_text(encoding="utf-8").partition(
        "<!-- mutants: printed by python -m tests.kernels.metal.mutants -->\n"
    )
    assert told[2].partition("\n<!-- end of mutants -->")[0] == table, "put what it prints between its two comments"
