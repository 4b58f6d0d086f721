"""On a Mac (conftest.py): the operations that the emulator runs elsewhere, on the GPU itself."""

from __future__ import annotations

import pytest
import torch

from kernels.metal.attention import SPLIT
from kernels.metal.runtime import load
from kernels.ops import DTYPES
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout
from kernels.selfcheck.check import check_ops
from kernels.selfcheck.op_db import OPS
from kernels.types import LayerSpec
from tests.kernels.test_attention import expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operation_is_the_references(dtype: torch.dtype) -> None:
    assert [verdict.fault for verdict in check_ops(load(), dtype, torch.device("mps"))] == [None] * len(OPS)


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_long_texts_attend_as_the_definition_says(dim: int) -> None:
    rows = (
        CaseRow(5 * SPLIT + 88, 1),
        CaseRow(SPLIT - 1, 1),
        CaseRow(-1, 1),
        CaseRow(3, 1),
        CaseRow(SPLIT + 30, 9),
        CaseRow(0, 300),
    )
    spec = LayerSpec(2, 14, dim, dim, scale=dim**-0.5)
    there = AttentionCase(load(), Layout(32), spec, rows, torch.float32, torch.device("mps"))
    here = AttentionCase(ReferenceOps(), Layout(32), spec, rows, torch.float32)  # draws the same numbers
    for case in (there, here):
        case.write()
    for i, (out, row) in enumerate(zip(there.attend(), rows, strict=True)):
        if row.past >= 0:
            assert (out.cpu().double() - expected(here, i, None)).abs().max() < 1e-5
