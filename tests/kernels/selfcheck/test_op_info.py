"""Rows of the table are complete: documented, and with the bytes that every implementation must move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.ops import DTYPES
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout
from kernels.selfcheck.op_db import OPS, markdown
from tests.kernels.backend_matrix import LAYOUTS, ROWS, SPECS
from tests.kernels.brute_force import visible_in_case
from tools.bench import kernel_inputs

DOC = Path(__file__).parents[3] / "docs" / "internals" / "kernels.md"
ROW = {op.full_name: op for op in OPS}


def test_the_documentation_has_the_table() -> None:
    text = DOC.read_text(encoding="utf-8")
    between = text.partition("<!-- operations: printed by python -m kernels.selfcheck.op_db -->\n")[2]
    told = between.partition("\n<!-- end of operations -->")[0]
    assert told == markdown(), (
        "put what `python -m kernels.selfcheck.op_db` prints between the two comments of docs/internals/kernels.md"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ROW)
def test_every_operation_has_calls_that_move_something(
    op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_inputs, "GIBIBYTE", 1 << 16)
    calls = kernel_inputs.make_calls(ROW[op], dtype, 40)
    assert calls
    assert all(ROW[op].count_bytes(*call) > 0 for call in calls)


def test_bytes_of_activations() -> None:
    x, weight = torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(5, 8, dtype=torch.bfloat16)
    assert ROW["linear"].count_bytes(x, weight) == 2 * (5 * 8 + 3 * 8 + 3 * 5)
    assert ROW["rms_norm"].count_bytes(x, weight[0], 1e-6) == ROW["rope"].count_bytes(x, None, None, None) == 2 * 48
    assert ROW["add_rms_norm"].count_bytes(x, x, weight[0], 1e-6) == 4 * 48
    assert ROW["silu_mul"].count_bytes(x) == 48 + 24


def test_a_step_of_a_mirror_moves_what_is_new_and_not_the_text() -> None:
    mirror, text = torch.zeros(14, 1000, 64), torch.zeros(1000, 2, 64)
    whole = ROW["repeat_kv_heads"].count_bytes(text, 7)
    assert whole == text.nbytes + mirror.nbytes
    assert ROW["repeat_kv_heads_step"].count_bytes(mirror, text[:1], 999) == whole // 1000


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kind)
@pytest.mark.parametrize("spec", SPECS)
def test_attention_moves_the_keys_that_some_query_sees(spec: str, layout: Layout) -> None:
    window = 40 if layout.ring else None
    case = AttentionCase(Nothing(), layout, SPECS[spec], ROWS, torch.float32)  # type: ignore[arg-type]
    keys = 0.0  # of all heads together, in heads
    for i, row in enumerate(ROWS):
        for head in range(case.spec.num_kv_heads if row.past >= 0 else 0):
            keys += int(visible_in_case(case, i, head, window)[1].any(0).sum())
    per_key = 4 * (case.spec.head_dim + case.spec.v_head_dim)
    q = case.get_step_inputs(case.q)
    found = ROW["attend"].count_bytes(q, q, case.store, 0, case.at, case.spec, window=window)
    assert found == pytest.approx(keys * per_key, abs=1)


class Nothing:
    def write_kv(self, *args: object) -> None: ...


def test_bytes_of_stored_vectors() -> None:
    spec = SPECS["values wider than keys"]  # 2 heads of 8 and 24
    for dtype, stored, out in ((torch.bfloat16, 128, 128), (torch.int8, 80, 256)):
        case = AttentionCase(
            Nothing(),  # type: ignore[arg-type]
            Layout(16),
            spec,
            [CaseRow(20, 3)],
            torch.bfloat16,
            formats=dtype,
        )
        k, v = case.get_step_inputs(case.k), case.get_step_inputs(case.v)
        assert ROW["write_kv"].count_bytes(case.store, 0, k, v, case.at) == 3 * (128 + stored)
        assert ROW["gather"].count_bytes(case.store, 0, case.at, 0, torch.arange(7)) == 7 * (stored + out)
        assert ROW["copy_blocks"].count_bytes(case.store, [0, 1], [2, 3]) == 4 * case.store.block_bytes
        slots = torch.arange(7)
        assert ROW["copy_tokens"].count_bytes(case.store, 0, slots, slots + 16) == 7 * 2 * stored
