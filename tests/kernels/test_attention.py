"""Every backend's attention equals the definition, for every kind of layer, memory layout and dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout
from plugin_kit.driver.reference import attention
from tests.kernels.backend_matrix import BACKENDS, LAYOUTS, NAMES, ROWS, SPECS, TOLERANCE
from tests.kernels.brute_force import visible_in_case

backends = pytest.mark.parametrize("backend", NAMES)
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kind)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


@dtypes
@layouts
@pytest.mark.parametrize("spec", SPECS)
@backends
def test_rows_attend_as_the_definition_says(backend: str, spec: str, layout: Layout, dtype: torch.dtype) -> None:
    window = 40 if layout.ring else None
    case = AttentionCase(BACKENDS[backend](), layout, SPECS[spec], ROWS, dtype)
    case.write()
    for i, (out, row) in enumerate(zip(case.attend(window=window), ROWS, strict=True)):
        if row.past < 0:
            assert (out == 7.0).all(), "a padding row has an output"
            continue
        want = expected(case, i, window)
        assert out.dtype is dtype
        assert (out.double() - want).abs().max() < TOLERANCE[dtype]


@layouts
@pytest.mark.parametrize("window", [1, 2, 13])
@backends
def test_a_strategys_window_leaves_the_sinks_in_sight(backend: str, window: int, layout: Layout) -> None:
    case = AttentionCase(BACKENDS[backend](), layout, SPECS["groups of 4"], ROWS, torch.float32)
    case.write()
    for i, (out, row) in enumerate(zip(case.attend(window=window), ROWS, strict=True)):
        if row.past >= 0:
            assert (out.double() - expected(case, i, window)).abs().max() < TOLERANCE[torch.float32]


@backends
def test_scores_of_any_size_overflow_nothing(backend: str) -> None:
    spec = SPECS["groups of 4"]._replace(scale=1e4)
    case = AttentionCase(BACKENDS[backend](), Layout(16), spec, [CaseRow(100, 1), CaseRow(130, 8)], torch.float32)
    case.write()
    for i, out in enumerate(case.attend()):
        assert out.isfinite().all()
        assert (out.double() - expected(case, i, None)).abs().max() < 1e-3


@layouts
@backends
def test_what_enters_can_be_gathered_at_its_indices(backend: str, layout: Layout) -> None:
    case = AttentionCase(BACKENDS[backend](), layout, SPECS["values wider than keys"], ROWS, torch.bfloat16)
    case.write()
    for i, row in enumerate(ROWS):
        if row.past < 0:
            continue
        kept = [case.list_kept(i, head)[0] for head in range(case.spec.num_kv_heads)]
        end = min(map(len, kept))
        oldest = max(layout.sinks, end - layout.ring) if layout.ring else 0
        indices = torch.tensor([*range(min(layout.sinks, end)), *range(oldest, end)])
        wanted = [
            torch.stack([part[i][which[indices], head] for head, which in enumerate(kept)], 1)
            for part in (case.k, case.v)
        ]
        by_head = indices[:, None].expand(-1, len(kept)) if layout.split_heads else indices
        found = case.ops.gather(case.store, 0, case.at, i, by_head)
        assert all(map(torch.equal, found, wanted))


@backends
def test_padding_is_written_nowhere(backend: str) -> None:
    case = AttentionCase(
        BACKENDS[backend](), Layout(16), SPECS["groups of 4"], [CaseRow(-1, 1), CaseRow(-1, 1)], torch.float32
    )
    case.get_step_inputs = lambda part: torch.ones_like(torch.cat(list(part)))  # type: ignore[method-assign]
    case.write()
    case.attend()
    assert (case.pages.memory == 0xFF).all()


@backends
def test_blocks_are_copied_whole_and_leave_their_neighbours_alone(backend: str) -> None:
    case = AttentionCase(
        BACKENDS[backend](),
        Layout(5),
        SPECS["values wider than keys"],
        [CaseRow(20, 1)],
        torch.float32,
        unused_blocks=6,
    )
    case.pages.memory.copy_(torch.randint(0, 255, case.pages.memory.shape).byte())
    blocks = case.store.blocks.clone()
    case.ops.copy_blocks(case.store, [4, 4, 6], [1, 9, 2])
    for block in range(len(blocks)):
        source = {1: 4, 9: 4, 2: 6}.get(block, block)
        assert torch.equal(case.store.blocks[block], blocks[source])


def expected(case: AttentionCase, i: int, window: int | None) -> Tensor:
    """Return the output [n, Hq, Dv] of a row by the definition, KV head by KV head: heads may keep different tokens."""
    spec, past = case.spec, case.rows[i].past
    group = spec.num_q_heads // spec.num_kv_heads
    outs = []
    for head in range(spec.num_kv_heads):
        which, mask = visible_in_case(case, i, head, window)
        queries = slice(head * group, (head + 1) * group)
        logits = None if spec.sink_logits is None else spec.sink_logits[queries]
        alone = spec._replace(num_kv_heads=1, num_q_heads=group, sink_logits=logits)
        k, v = (part[i][which, head : head + 1] for part in (case.k, case.v))
        outs.append(attention(case.q[i][past:, queries], k, v, alone, mask))
    return torch.cat(outs, 1)
