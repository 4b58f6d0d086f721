"""Every backend's attention equals the definition, for every kind of layer, memory layout and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.kv_formats import UINT4, KVFormat, KVFormats
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout
from kernels.types import LayerSpec, Slots
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
    for i, ((out, lse), row) in enumerate(zip(case.attend_with_lse(window=window), ROWS, strict=True)):
        if row.past < 0:
            assert (out == 7.0).all(), "a padding row has an output"
            assert (lse == 7.0).all(), "a padding row has a logarithm of its sum"
            continue
        want = expected(case, i, window)
        assert out.dtype is dtype
        assert (out.double() - want).abs().max() < TOLERANCE[dtype]
        assert_close(lse, expected_lse(case, i, window), dtype)


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


FORMATS: Mapping[str, KVFormat] = {"int8": KVFormat(torch.int8), "int4, rotated": KVFormat(UINT4, rotated=True)}
LONG = (CaseRow(1100, 1), CaseRow(300, 1), CaseRow(-1, 1), CaseRow(130, 1), CaseRow(140, 9))
WIDE = LayerSpec(2, 6, 64, 96, scale=0.125)
CAPPED = WIDE._replace(softcap=3.0, sink_logits=torch.tensor([-3.0, 0.0, 1.0, 2.5, -1.0, 4.0]))


@dtypes
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("spec", [WIDE, CAPPED, WIDE._replace(window=70)], ids=["plain", "capped", "window"])
@backends
def test_quantized_keys_are_summed_as_the_definition_says(
    backend: str, spec: LayerSpec, format: str, dtype: torch.dtype
) -> None:
    formats = KVFormats(FORMATS[format], FORMATS[format])
    case = AttentionCase(BACKENDS[backend](), Layout(16), spec, LONG, dtype, formats=formats)
    case.write()
    found = case.attend_with_lse()
    for i, ((_, lse), row) in enumerate(zip(found, LONG, strict=True)):
        if row.past >= 0:
            indices = torch.arange(row.past + row.tokens)
            case.k[i], case.v[i] = ReferenceOps().gather(case.store, 0, case.at, i, indices)
            assert_close(lse, expected_lse(case, i, None), dtype)


@layouts
@backends
def test_the_output_has_the_same_bits_without_the_logarithms_of_sums(backend: str, layout: Layout) -> None:
    case = AttentionCase(BACKENDS[backend](), layout, SPECS["all at once"], ROWS, torch.bfloat16)
    case.write()
    for alone, (out, _) in zip(case.attend(window=30), case.attend_with_lse(window=30), strict=True):
        assert torch.equal(alone, out)


@dtypes
@pytest.mark.parametrize("format", [None, *FORMATS])
@pytest.mark.parametrize("layout", [Layout(16), Layout(16, split_heads=True)], ids=lambda layout: layout.kind)
@pytest.mark.parametrize("spec", [WIDE, CAPPED], ids=["plain", "capped"])
@backends
def test_results_over_two_parts_of_the_keys_are_merged_to_those_over_all(
    backend: str, spec: LayerSpec, layout: Layout, format: str | None, dtype: torch.dtype
) -> None:
    """Sink logits count in one part alone."""
    formats = None if format is None else KVFormats(FORMATS[format], FORMATS[format])
    case = AttentionCase(BACKENDS[backend](), layout, spec, LONG, dtype, formats=formats)
    case.write()
    whole, whole_lse = map(torch.cat, zip(*case.attend_with_lse(), strict=True))
    outs, sums = [], []
    for at, each in zip(split_keys(case.at, 64), (spec._replace(sink_logits=None), spec), strict=True):
        outs.append(torch.full_like(whole, 7.0))
        sums.append(torch.full_like(whole_lse, 7.0))
        q = case.get_step_inputs(case.q)
        case.ops.attend(outs[-1], q, case.store, 0, at, each, lse=sums[-1])
    lse = torch.logaddexp(*sums)
    merged = sum(out.float() * (part - lse).exp()[..., None] for out, part in zip(outs, sums, strict=True))
    assert isinstance(merged, Tensor)
    is_real = torch.cat([torch.full((row.tokens,), row.past >= 0) for row in LONG])
    assert_close(merged[is_real], whole[is_real].double(), dtype)
    assert_close(lse[is_real], whole_lse[is_real].double(), dtype)


def split_keys(at: Slots, count: int) -> tuple[Slots, Slots]:
    """Return the addresses of the first `count` keys of each row, which all of its queries see, and of the others.

    Every query is a row of its own in the first, as a query sees keys up to its own index.
    """
    counts = at.q_start.diff()
    start = at.start.repeat_interleave(counts, 0)
    first = replace(
        at,
        table_row=at.table_row.repeat_interleave(counts, 0),
        q_start=torch.arange(len(start) + 1, dtype=torch.int32),
        start=torch.where(start < 0, start, count - 1),
        num_decode=len(start),
        max_q=1,
        max_kv=count,
    )
    others = torch.where(at.start < 0, at.start, at.start - count)
    return first, replace(at, table=at.table[:, count // at.block_size :], start=others, max_kv=at.max_kv - count)


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


def expected_lse(case: AttentionCase, i: int, window: int | None) -> Tensor:
    """Return the logarithms [n, Hq] of the sums of exponentials of a row's scores by the definition, in float64."""
    spec, past = case.spec, case.rows[i].past
    group = spec.num_q_heads // spec.num_kv_heads
    sums = []
    for head in range(spec.num_q_heads):
        which, mask = visible_in_case(case, i, head // group, window)
        scores = case.q[i][past:, head].double() @ case.k[i][which, head // group].double().T * spec.scale
        if spec.softcap is not None:
            scores = (scores / spec.softcap).tanh() * spec.softcap
        scores = scores.masked_fill(~mask, -torch.inf)
        if spec.sink_logits is not None:
            scores = torch.cat((scores, spec.sink_logits[head].double().expand(len(scores), 1)), 1)
        sums.append(scores.logsumexp(1))
    return torch.stack(sums, 1)


def assert_close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Assert that numbers that were computed in `dtype` are near those of the definition, which are in float64."""
    assert (found.double() - wanted).abs().max() < TOLERANCE[dtype] * wanted.abs().max().clamp_min(1)
