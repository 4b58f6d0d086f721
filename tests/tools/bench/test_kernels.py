"""The benchmark measures every operation on every backend; its loads are small here, and its figures nobody's."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backends import REFERENCE, list_backends
from kernels.cpu.library import find_memory_reader
from kernels.kv_formats import Plane, as_formats
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.op_db import OPS
from kernels.types import Slots
from tools.bench import kernel_inputs
from tools.bench import kernels as bench
from tools.bench.__main__ import main


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernel_inputs, bench):
        monkeypatch.setattr(module, "GIBIBYTE", 1 << 16)


def test_every_operation_has_a_row_for_every_backend(tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    assert main(["kernels", "--json", str(file), "--context", "40", "--dtype", "bfloat16"]) == 0
    rows = json.loads(file.read_text())["rows"]
    found = {(row["what"].partition(",")[0], row["variant"]) for row in rows}
    there = [REFERENCE, *(backend.name for backend in list_backends("cpu") if backend.missing is None)]
    assert set(product(bench.OP_NAMES, there)) <= found
    assert {("attend", "sdpa"), ("attend", "sdpa+gather")} <= found
    assert all(row["value"] > 0 < row["limit"] for row in rows)


@pytest.mark.parametrize("layout", get_args(kernel_inputs.Layout))
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, *kernel_inputs.QUANTIZED.values()], ids=str)
def test_attention_reads_whole_sequences_in_each_layout(
    layout: kernel_inputs.Layout, stored: kernel_inputs.Stored
) -> None:
    """One query, and every stored number is seen: the result is torch's, of the keys in whatever order."""
    out, q, store, layer, at, spec = kernel_inputs.attend(stored, 64, batch=3, layout=layout)[-1]
    ReferenceOps().attend(out, q, store, layer, at, spec)
    k, v = (_read_planes(plane, at) for plane in store.planes(layer))  # [3, H, 64, D]
    expected = F.scaled_dot_product_attention(q.float()[:, :, None], k, v, scale=spec.scale, enable_gqa=True)
    torch.testing.assert_close(
        out.float(), expected[:, :, 0], atol=2e-2 if stored is not torch.float32 else 1e-5, rtol=1e-2
    )
    (op,) = (op for op in OPS if op.full_name == "attend")
    vectors = sum(format.compute_vector_bytes(64) for format in as_formats(stored))
    assert op.count_bytes(out, q, store, layer, at, spec) == 3 * 64 * 2 * vectors


def _read_planes(plane: Plane, at: Slots) -> Tensor:
    blocks = at.table[at.table_row].long()  # [3, blocks]
    return plane.decode().float()[blocks].transpose(1, 2).flatten(2, 3)


def test_all_of_the_memory_is_read() -> None:
    words = torch.arange(6400)
    if (read := find_memory_reader()) is not None:
        assert read(words) == int(words.sum())
