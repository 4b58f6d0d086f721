"""Tests of the Metal kernels beyond the common ones: long sequences in two passes, wide groups, many blocks, arguments
that do not fit, and that nothing is compiled twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.kv_formats import UINT4, KVFormat, KVFormats
from kernels.metal import attention, backend
from kernels.metal.attention import SPLIT
from kernels.metal.backend import MAX_COPY_PAIRS, MetalOps
from kernels.metal.library import Kernels
from kernels.metal.runtime import load_emulated
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout
from kernels.store import KVStore, Pages, compute_block_bytes
from kernels.types import LayerSpec, Slots
from metal_emulator import compile_shader
from tests.kernels.quantized_weights import quantize_as_mlx
from tests.kernels.sparse_memory import sparse_memory
from tests.kernels.test_attention import assert_close, expected, expected_lse

LONG = (CaseRow(2 * SPLIT + 88, 1), CaseRow(SPLIT - 1, 1), CaseRow(-1, 1), CaseRow(SPLIT, 1), CaseRow(3, 1))
SPEC = LayerSpec(2, 4, 16, 8, scale=0.25)


@pytest.fixture(scope="module")
def ops() -> MetalOps:
    """Return the operations in the emulator, with checks for races and bounds."""
    return load_emulated(checked=True)


@pytest.mark.parametrize("layout", [Layout(16), Layout(700), Layout(32, sinks=4, ring=300)], ids=lambda at: at.kind)
@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        SPEC._replace(window=100, sink_logits=torch.tensor([0.0, 3.0, -1.0, 9.0])),
        LayerSpec(1, 20, 80, 80, scale=0.11, softcap=5.0),
        LayerSpec(1, 3, 256, 200, scale=0.06),
    ],
    ids=["plain", "window and sinks", "a group of 20", "wide heads"],
)
def test_long_texts_attend_as_the_definition_says(ops: MetalOps, spec: LayerSpec, layout: Layout) -> None:
    window = 290 if layout.ring else None
    rows = (*LONG, CaseRow(SPLIT + 30, 9), CaseRow(0, 70))
    case = AttentionCase(ReferenceOps(), layout, spec, rows, torch.float32)
    case.write()
    for i, ((out, lse), row) in enumerate(zip(case.attend_with_lse(ops, window=window), rows, strict=True)):
        if row.past >= 0:
            assert (out.double() - expected(case, i, window)).abs().max() < 3e-6
            assert_close(lse, expected_lse(case, i, window), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_pass_and_two_have_the_same_bits(ops: MetalOps, dtype: torch.dtype) -> None:
    """A sequence of one split, alone and beside one of several splits."""
    short, long = CaseRow(SPLIT - 1, 1), CaseRow(3 * SPLIT, 1)
    alone, beside = (AttentionCase(ReferenceOps(), Layout(16), SPEC, rows, dtype) for rows in ([short], [short, long]))
    for case in (alone, beside):
        for part in (case.q, case.k, case.v):
            part[0].copy_(torch.randn(part[0].shape, generator=torch.Generator().manual_seed(1)))
        case.write_past(0, short.past)
        case.write()
    assert torch.equal(alone.attend(ops)[0], beside.attend(ops)[0])


def test_many_long_texts_are_summed_some_at_a_time(ops: MetalOps, monkeypatch: pytest.MonkeyPatch) -> None:
    case = AttentionCase(ReferenceOps(), Layout(16), SPEC, (*LONG, CaseRow(0, 9)), torch.float32)
    case.write()
    together = case.attend(ops)
    monkeypatch.setattr(attention, "MAX_PARTIAL_SUMS", 200)  # two rows
    for ours, theirs in zip(case.attend(ops), together, strict=True):
        assert torch.equal(ours, theirs)


def test_many_blocks_are_copied_in_several_launches(ops: MetalOps) -> None:
    pages = Pages(2 * MAX_COPY_PAIRS + 20, 128)
    store = KVStore(pages, [LayerSpec(1, 1, 16, 16)], 1, torch.float32)
    pages.memory.copy_(torch.randint(0, 255, pages.memory.shape).byte())
    before, half = store.blocks.clone(), MAX_COPY_PAIRS + 10
    ops.copy_blocks(store, list(range(half)), list(range(half, 2 * half)))
    assert torch.equal(store.blocks[half : 2 * half], before[:half])
    assert torch.equal(store.blocks[:half], before[:half])


def test_a_large_block_is_copied_in_several_launches(ops: MetalOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MAX_COPY_UNITS", 300)  # units: of three launches the last one copies less
    spec = LayerSpec(1, 1, 16, 16)
    pages = Pages(6, compute_block_bytes([spec], 100, torch.float32) + 128)
    store = KVStore(pages, [spec], 100, torch.float32)
    pages.memory.copy_(torch.randint(0, 255, pages.memory.shape).byte())
    before = store.blocks.clone()
    ops.copy_blocks(store, [0, 5], [4, 1])
    for block, source in enumerate((0, 5, 2, 3, 0, 5)):
        assert torch.equal(store.blocks[block, : store.block_bytes], before[source, : store.block_bytes])
        assert torch.equal(store.blocks[block, store.block_bytes :], before[block, store.block_bytes :])


def test_a_page_may_have_more_than_32_gib(ops: MetalOps) -> None:
    """That is 2^31 copy units and more."""
    page = 33 << 30
    store = KVStore(Pages(3, page, memory=sparse_memory(3 * page)), [LayerSpec(1, 1, 16, 16)], 4, torch.float32)
    store.blocks[1, : store.block_bytes] = torch.randint(1, 255, (store.block_bytes,)).byte()
    ops.copy_blocks(store, [1], [2])
    assert torch.equal(store.blocks[2, : store.block_bytes], store.blocks[1, : store.block_bytes])
    assert not store.blocks[0, : store.block_bytes].any()


@pytest.mark.parametrize("inputs", [1, 3, 127, 128, 130, 509])
def test_products_of_odd_widths(ops: MetalOps, inputs: int) -> None:
    x, weight = torch.randn(3, inputs), torch.randn(33, inputs)
    torch.testing.assert_close(ops.linear(x, weight).double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- formats of keys and values
FORMATS = {
    "int8": KVFormat(torch.int8),
    "int4": KVFormat(UINT4),
    "int4, rotated": KVFormat(UINT4, rotated=True),
    "as computed": KVFormat(torch.float32),
}
HARD = (  # numbers of a vector that are hard to round
    torch.nan,
    torch.inf,
    -torch.inf,
    *(3e38, -3e38, 3.39e38),  # of which the difference, or the scale, is infinite
    *(1e-40, -1e-38, 0.0, 2.5, 7.5),
)


@pytest.mark.parametrize("format", list(FORMATS)[1:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int4_has_the_bits_of_the_reference_in_every_width(ops: MetalOps, format: str, dtype: torch.dtype) -> None:
    """Vectors of normal numbers, equal ones, whole ones (halves are rounded), and with one that is hard to round."""
    formats = KVFormats(FORMATS[format], FORMATS[format])
    for dim in range(8, 257, 8):
        spec, tokens = LayerSpec(1, 1, dim, 264 - dim), 4 + len(HARD)
        kept = []
        for each in (ReferenceOps(), ops):
            case = AttentionCase(each, Layout(7), spec, [CaseRow(0, tokens)], dtype, formats=formats)
            for part in (case.k[0], case.v[0]):
                part[0] = 0.3
                part[1] = 0.0
                part[2:4] = torch.arange(part.shape[-1]).flip(0) % 31 / 2 - 4
                part[4:, 0, 5] = torch.tensor(HARD)
            case.write()
            found = each.gather(case.store, 0, case.at, 0, torch.arange(tokens))
            kept.append((case.pages.memory, *found))
        for theirs, ours in zip(*kept, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("v", FORMATS)
@pytest.mark.parametrize("k", FORMATS)
def test_keys_and_values_of_any_formats_have_kernels(k: str, v: str) -> None:
    compiled: list[str] = []

    def recording(source: str) -> Any:
        compiled.append(source)
        return compile_shader(source)

    ops, formats = MetalOps(Kernels(recording)), KVFormats(FORMATS[k], FORMATS[v])
    spec, rows = LayerSpec(2, 4, 64, 96, scale=0.125), (CaseRow(SPLIT + 9, 1), CaseRow(3, 5))
    case = AttentionCase(ops, Layout(16), spec, rows, torch.float32, formats=formats)
    case.write()
    for ours, theirs in zip(case.attend(), case.attend(ReferenceOps()), strict=True):
        assert (ours - theirs).abs().max() < 3e-6
    ops.gather(case.store, 0, case.at, 1, torch.arange(3))
    names = {torch.float32: "float", torch.int8: "char", UINT4: "uchar"}
    typedefs = f"typedef {names[formats.k.dtype]} K;\ntypedef {names[formats.v.dtype]} V;\n"
    assert all(typedefs in source for source in compiled)
    assert len(compiled) == 3, "store, decode, prefill"


def test_int4_of_heads_that_are_too_wide_is_the_references(ops: MetalOps) -> None:
    formats = KVFormats(FORMATS["int4, rotated"], FORMATS["int8"])
    case = AttentionCase(ops, Layout(16), LayerSpec(1, 2, 264, 16), [CaseRow(5, 3)], torch.float32, formats=formats)
    case.write()
    found = ops.gather(case.store, 0, case.at, 0, torch.arange(8))
    wanted = ReferenceOps().gather(case.store, 0, case.at, 0, torch.arange(8))
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(case.attend()[0], case.attend(ReferenceOps())[0])


def test_heads_that_are_too_wide_are_the_references(ops: MetalOps) -> None:
    case = AttentionCase(
        ReferenceOps(), Layout(16), LayerSpec(1, 2, 264, 16), [CaseRow(5, 1), CaseRow(0, 3)], torch.float32
    )
    case.write()
    for i, out in enumerate(case.attend(ops)):
        assert (out.double() - expected(case, i, None)).abs().max() < 1e-5


def _store(dtype: torch.dtype = torch.float32) -> AttentionCase:
    case = AttentionCase(ReferenceOps(), Layout(16), SPEC, [CaseRow(5, 1), CaseRow(0, 3)], dtype)
    case.write()
    return case


def test_a_store_of_a_type_that_no_kernel_knows_is_the_references(ops: MetalOps) -> None:
    case, positions = _store(torch.float64), torch.tensor([4, 0])
    for found, whole in zip(ops.gather(case.store, 0, case.at, 0, positions), (case.k, case.v), strict=True):
        assert torch.equal(found, whole[0][positions])


Call = Callable[[MetalOps, AttentionCase], object]


def _wrong_layers() -> dict[str, tuple[str, Call]]:
    """Return a description, words of the message, and the call, for each wrong call."""
    x, square, norm = torch.ones(2, 64), torch.ones(64, 64), torch.ones(64)
    q, cos, here = torch.ones(4, 4, 16), torch.ones(9, 8), torch.zeros(4, dtype=torch.int64)
    quantized, away = quantize_as_mlx(square, 4, 32), torch.device("meta")
    return {
        "a weight of another width": ("x must be", lambda ops, at: ops.linear(x, torch.ones(5, 63))),
        "a short bias": ("bias must be .*64", lambda ops, at: ops.linear(x, square, torch.ones(63))),
        "a transposed weight": ("must be dense", lambda ops, at: ops.linear(x, torch.ones(64, 5).T)),
        "a weight elsewhere": ("on meta", lambda ops, at: ops.linear(x, square.to(away))),
        "a bias elsewhere": ("on meta", lambda ops, at: ops.linear(x, square, norm.to(away))),
        "a quantized weight of another width": (
            "x must be",
            lambda ops, at: ops.linear(x[:, 1:], quantized),
        ),
        "a long bias of many rows": (
            "bias must be .*64",
            lambda ops, at: ops.linear(torch.ones(99, 64), quantized, torch.ones(65)),
        ),
        "a quantized weight elsewhere": (
            "on meta",
            lambda ops, at: ops.linear(x, quantized.to(away)),
        ),
        "a quantized weight's scale elsewhere": (
            "on meta",
            lambda ops, at: ops.linear(x, replace(quantized, scale=quantized.scale.to(away))),
        ),
        "a norm of another width": ("must be", lambda ops, at: ops.rms_norm(x, norm[1:], 1e-6)),
        "a norm elsewhere": ("on meta", lambda ops, at: ops.rms_norm(x, norm.to(away), 1e-6)),
        "a norm of every second number": ("must be dense", lambda ops, at: ops.rms_norm(x[:, :32], norm[::2], 1e-6)),
        "a sum of two shapes": ("delta must be", lambda ops, at: ops.add_rms_norm(x, x[:1], norm, 1e-6)),
        "a sum's norm of another width": ("must be", lambda ops, at: ops.add_rms_norm(x, x, norm[1:], 1e-6)),
        "a sum's norm elsewhere": ("on meta", lambda ops, at: ops.add_rms_norm(x, x, norm.to(away), 1e-6)),
        "tables of another head": ("must be", lambda ops, at: ops.rope(q, cos[:, :7], cos[:, :7], here)),
        "tables elsewhere": ("on meta", lambda ops, at: ops.rope(q, cos, cos.to(away), here)),
        "positions in int32": (r"positions must be int64 \[4\]", lambda ops, at: ops.rope(q, cos, cos, here.int())),
        "positions elsewhere": ("on meta", lambda ops, at: ops.rope(q, cos, cos, here.to(away))),
        "a gate of odd width": ("two halves", lambda ops, at: ops.silu_mul(x[:, 1:])),
        "a gate of every second number": ("must be dense", lambda ops, at: ops.silu_mul(x[:, ::2])),
        "heads of every second number": ("must be dense", lambda ops, at: ops.repeat_kv_heads(q[..., ::2], 2)),
    }


def _wrong_memory() -> dict[str, tuple[str, Call]]:
    """The same for operations on KV memory."""
    q, out = torch.ones(4, 4, 16), torch.ones(4, 4, 8)
    k, v, here = torch.ones(4, 2, 16), torch.ones(4, 2, 8), torch.zeros(4, dtype=torch.int64)
    away, sinks = torch.device("meta"), SPEC._replace(sink_logits=torch.ones(3))
    more = SPEC._replace(num_kv_heads=4)

    def moved(at: Slots) -> Slots:
        return replace(at, table=at.table.to(away))

    def wide(at: Slots) -> Slots:
        return replace(at, start=at.start.long())

    def short(at: Slots) -> Slots:
        return replace(at, q_start=at.q_start[1:])

    return {
        "keys of another head": ("k must be", lambda ops, at: ops.write_kv(at.store, 0, k[..., 1:], v, at.at)),
        "values of another head": ("v must be", lambda ops, at: ops.write_kv(at.store, 0, k, k, at.at)),
        "fewer values than keys": (
            r"v must be .*\[4, 2, 8\]",
            lambda ops, at: ops.write_kv(at.store, 0, k, v[1:], at.at),
        ),
        "keys elsewhere": (
            "on meta",
            lambda ops, at: ops.write_kv(at.store, 0, k.to(away), v.to(away), at.at),
        ),
        "keys at addresses elsewhere": (
            "on meta",
            lambda ops, at: ops.write_kv(at.store, 0, k, v, moved(at.at)),
        ),
        "keys at addresses in int64": (
            "start must be int32",
            lambda ops, at: ops.write_kv(at.store, 0, k, v, wide(at.at)),
        ),
        "keys of too few offsets": (
            r"q_start must be int32 \[3\]",
            lambda ops, at: ops.write_kv(at.store, 0, k, v, short(at.at)),
        ),
        "queries of another head": (
            "must be",
            lambda ops, at: ops.attend(out, q[..., 1:], at.store, 0, at.at, SPEC),
        ),
        "results for fewer queries": (
            "must be",
            lambda ops, at: ops.attend(out[1:], q, at.store, 0, at.at, SPEC),
        ),
        "queries elsewhere": (
            "on meta",
            lambda ops, at: ops.attend(out.to(away), q.to(away), at.store, 0, at.at, SPEC),
        ),
        "queries of addresses elsewhere": (
            "on meta",
            lambda ops, at: ops.attend(out, q, at.store, 0, moved(at.at), SPEC),
        ),
        "more key heads than are stored": (
            "not fit a store",
            lambda ops, at: ops.attend(out, q, at.store, 0, at.at, more),
        ),
        "a sink too few": ("sink_logits must be", lambda ops, at: ops.attend(out, q, at.store, 0, at.at, sinks)),
        "a row that is not there": ("no row 2", lambda ops, at: ops.gather(at.store, 0, at.at, 2, here)),
        "gathered indices elsewhere": (
            "on meta",
            lambda ops, at: ops.gather(at.store, 0, at.at, 0, here.to(away)),
        ),
        "an index alone": (
            "indices must be",
            lambda ops, at: ops.gather(at.store, 0, at.at, 0, torch.zeros(1, 1).long()),
        ),
        "a block that is not there": (
            "blocks must be from 0 to",
            lambda ops, at: ops.copy_blocks(at.store, [0], [at.store.num_blocks]),
        ),
    }


WRONG = _wrong_layers() | _wrong_memory()


@pytest.mark.parametrize("what", WRONG)
def test_what_would_write_astray_is_refused_before_it_is_launched(ops: MetalOps, what: str) -> None:
    words, call = WRONG[what]
    with pytest.raises(ValueError, match=words):
        call(ops, _store())


def test_nothing_is_compiled_twice() -> None:
    compiled: list[str] = []

    def counting(source: str) -> Any:
        compiled.append(source)
        return compile_shader(source)

    ops = MetalOps(Kernels(counting))
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            ops.silu_mul(torch.ones(2, 8, dtype=dtype))
            ops.repeat_kv_heads(torch.ones(2, 2, 8, dtype=dtype), 2)
    assert len(compiled) == 2
