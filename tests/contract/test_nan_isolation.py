"""NaN and infinity do not spread: neither to other rows, nor to queries that may not see the token.

Every operation and backend takes part by being registered; strategies promise it as well (test_promises.py). The bits
of a normal call are compared with those of the same call with a NaN or an infinity in it. Cases are drawn anew each
time; the seed is printed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from kernels.kv_formats import INT4, INT8, KVFormat, KVFormats
from kernels.ops import DTYPES, Ops
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout
from kernels.selfcheck.layer_ops import FORWARD_LAYERS
from kernels.selfcheck.op_db import OPS
from kernels.selfcheck.op_info import OpInfo
from kernels.types import LayerSpec
from tests.kernels.backend_matrix import BACKENDS, LAYOUTS, SPECS
from tests.kernels.brute_force import visible_in_case
from tests.kernels.recorded_calls import Call, calls, real_tokens

pytestmark = pytest.mark.every_backend

POISONS = (torch.nan, torch.inf, -torch.inf)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

FORMATS: Mapping[str, Sequence[KVFormat]] = {
    "same": (),
    "int8": (INT8, INT8),
    "int4": (INT4, INT4),
    "int8, int4": (INT8, INT4),
}


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, NaN included."""
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


# ---------------------------------------------------------------- one row of an operation
@dtypes
@pytest.mark.parametrize("op", [op for op in OPS if op.row_arguments], ids=lambda op: op.full_name)
def test_a_row_that_is_no_number_leaves_the_others_as_they_are(
    backend: str, op: OpInfo, dtype: torch.dtype, rng: random.Random
) -> None:
    ops = BACKENDS[backend]()
    tried = list(calls(op, ops, dtype))
    for call in rng.sample(tried, min(8, len(tried))):
        for name in op.row_arguments:
            poison = rng.choice(POISONS)
            x = call.arguments.get(name)
            if x is not None and len(x) > 1:
                row = rng.randrange(len(x))
                check_rows(ops, call, row, name, poisoned(x, row, poison, rng))


def poisoned(x: Tensor, row: int, poison: float, rng: random.Random) -> Tensor:
    """Return a copy of x with one number of the row, or all of them, replaced by NaN or infinity.

    The copy has the strides and the storage offset of x, as torch's products depend on the alignment of their rows.
    """
    storage = x.new_empty(x.untyped_storage().nbytes() // x.element_size())
    changed = storage.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)
    numbers = changed[row : row + 1].flatten()
    if rng.random() < 0.5:
        numbers.fill_(poison)
    else:
        numbers[rng.randrange(len(numbers))] = poison
    changed[row] = numbers.view(x[row].shape)
    return changed


def check_rows(ops: Ops, call: Call, row: int, name: str, x: Tensor) -> None:
    clean, found = call.run(ops), call.run(ops, **{name: x})
    rows = len(x)
    if call.op.name == "write_kv":
        written = int((clean[0] != found[0]).sum())
        assert written <= call.op.count_bytes(**call.arguments) // rows, "another token's slot was written"
        return
    if call.op.name == FORWARD_LAYERS.name:
        clean, found = clean[:1], found[:1]  # keys are the same if what is computed of them is
        others = real_tokens(call.arguments["attention"], unless_seeing=row)
    else:
        others = [i for i in range(rows) if i != row]
    by_column = call.op.name.startswith("repeat_kv_heads")
    start = call.arguments.get("start", 0)
    for before, after in zip(clean, found, strict=True):
        if before.dtype is torch.uint8:
            assert torch.equal(before, after), "the store was written"
        elif by_column:
            columns = [i for i in range(before.shape[1]) if i != start + row]
            assert same(before[:, columns], after[:, columns])
        else:
            assert same(before[others], after[others]), f"{call.op.name}: row {row} of {name} reached another"


# ---------------------------------------------------------------- keys and values that a query may not see
@dtypes
@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("spec", ["groups of 7", "all at once", "the model's window"])
def test_a_query_knows_nothing_of_keys_that_it_may_not_see(
    backend: str, spec: str, kv: str, dtype: torch.dtype, rng: random.Random
) -> None:
    """A decode row and chunks, in every memory layout, with any of keys, values and queries replaced."""
    for layout in LAYOUTS if spec == "all at once" else LAYOUTS[1::3]:
        if any(dim % format.divisor for format in FORMATS[kv] for dim in SPECS[spec][2:4]):
            continue
        window = rng.choice([3, 40]) if layout.ring else rng.choice([None, 20])
        check_scene(BACKENDS[backend](), layout, spec, kv, dtype, window, rng.choice(POISONS), rng)


def check_scene(
    ops: Ops,
    layout: Layout,
    spec: str,
    kv: str,
    dtype: torch.dtype,
    window: int | None,
    poison: float,
    rng: random.Random,
) -> None:
    rows = [
        CaseRow(rng.randrange(100), 1),
        CaseRow(-1, 1),
        CaseRow(rng.randrange(60), rng.randint(2, 11)),
        CaseRow(0, 140),
    ]
    rows = rows[:3] if layout.ring else rows
    bad = [[j for j in range(row.past + row.tokens) if rng.random() < 0.04] for row in rows]
    bad[rng.choice([0, 2])] = []
    scenes = [Poisoned(ops, layout, SPECS[spec], rows, dtype, bad, each, FORMATS[kv]) for each in (None, poison)]
    for scene in scenes:
        scene.write()
    clean, found = (scene.attend(window=window) for scene in scenes)
    group = SPECS[spec].num_q_heads // SPECS[spec].num_kv_heads
    for i, (row, tokens, before, after) in enumerate(zip(rows, bad, clean, found, strict=True)):
        for head in range(SPECS[spec].num_kv_heads if row.past >= 0 else 0):
            which, mask = visible_in_case(scenes[0], i, head, window)
            queries = slice(head * group, (head + 1) * group)
            unaware = ~mask[:, torch.isin(which, torch.tensor(tokens, dtype=torch.int64))].any(1)
            assert same(before[unaware, queries], after[unaware, queries]), f"{row}: {tokens} reached others, {layout}"
            assert not after[~unaware, queries].isfinite().all() or unaware.all(), "what is seen is not hidden"


class Poisoned(AttentionCase):
    """An attention case in which the queries, keys and values of some tokens are all one number."""

    def __init__(
        self,
        ops: Ops,
        layout: Layout,
        spec: LayerSpec,
        rows: list[CaseRow],
        dtype: torch.dtype,
        bad: list[list[int]],
        poison: float | None,
        formats: Sequence[KVFormat],
    ) -> None:
        self._bad, self._poison = bad, poison
        super().__init__(ops, layout, spec, rows, dtype, formats=KVFormats(*formats) if formats else None)

    def write_past(self, row: int, past: int) -> None:
        if self._poison is not None:
            for part in (self.q, self.k, self.v):
                part[row][self._bad[row]] = self._poison
        super().write_past(row, past)
