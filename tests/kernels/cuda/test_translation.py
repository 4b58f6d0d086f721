"""The Metal kernels as CUDA C++, compiled for the CPU: they compute what the reference computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.cuda import library
from kernels.cuda.translation import translate
from kernels.metal.attention import SPLIT
from kernels.metal.backend import MetalOps
from kernels.metal.source import FOLDER, assemble_source
from kernels.ops import DTYPES
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout
from kernels.selfcheck.check import check_ops
from kernels.selfcheck.op_db import OPS
from kernels.types import LayerSpec
from tests.kernels.cuda.host_kernels import load_host_ops
from tests.kernels.metal.mutation_testing import CPU
from tests.kernels.test_attention import expected, expected_lse


@pytest.fixture(scope="module")
def ops() -> MetalOps:
    return load_host_ops()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operation_is_the_references(ops: MetalOps, dtype: torch.dtype) -> None:
    assert [verdict.fault for verdict in check_ops(ops, dtype, CPU)] == [None] * len(OPS)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_long_texts_attend_as_the_definition_says(ops: MetalOps, dim: int) -> None:
    rows = CaseRow(2 * SPLIT + 88, 1), CaseRow(SPLIT, 1), CaseRow(-1, 1), CaseRow(3, 1), CaseRow(SPLIT + 3, 5)
    spec = LayerSpec(2, 14, dim, dim, scale=dim**-0.5)
    case = AttentionCase(ReferenceOps(), Layout(32), spec, rows, torch.float32)
    case.write()
    for i, ((out, lse), row) in enumerate(zip(case.attend_with_lse(ops), rows, strict=True)):
        if row.past >= 0:
            assert (out.double() - expected(case, i, None)).abs().max() < 1e-5
            assert (lse.double() - expected_lse(case, i, None)).abs().max() < 1e-5


def test_grids_beyond_cudas_limits_take_several_launches(ops: MetalOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MAX_GROUPS", (3, 2, 2))
    x, cos, sin = torch.randn(9, 5, 12), torch.randn(20, 6), torch.randn(20, 6)
    arguments = x, cos, sin, torch.arange(9)
    torch.testing.assert_close(ops.rope(*arguments), ReferenceOps().rope(*arguments))
    gate_up = torch.randn(7, 2 * 900)
    torch.testing.assert_close(ops.silu_mul(gate_up), ReferenceOps().silu_mul(gate_up))
    case = AttentionCase(ReferenceOps(), Layout(32), LayerSpec(5, 10, 16, 16), [CaseRow(600, 1)] * 3, torch.float32)
    case.write()
    for i, out in enumerate(case.attend(ops)):
        assert (out.double() - expected(case, i, None)).abs().max() < 1e-5


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.metal")), ids=lambda path: path.name)
def test_lines_keep_their_numbers(path: Path) -> None:
    source = assemble_source(path.stem, {})
    for line, was in zip(translate(source).splitlines(), source.splitlines(), strict=False):
        if was.startswith(("#line", "struct ", "  return ", "}")):
            assert line.rstrip() == was.partition("//")[0].rstrip()


def test_a_kernel_that_is_not_there_is_told() -> None:
    with pytest.raises(AttributeError, match="there is no kernel swap"):
        library.CudaLibrary(_no_launcher).swap  # noqa: B018


def _no_launcher(name: str) -> library.Launcher:
    raise RuntimeError("CUDA_ERROR_NOT_FOUND")
