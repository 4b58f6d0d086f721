"""Every backend with offsets of 2^31 and more: of layers, heads, slots and blocks.

Such a KV memory has tens of gigabytes of address space (sparse_memory.py), of which the tests touch a few pages.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.ops import KVLocation
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout, Step
from kernels.selfcheck.check import compute_error
from kernels.selfcheck.op_info import ATTENTION
from kernels.store import KVStore, Pages, compute_block_bytes
from kernels.types import LayerSpec, Slots
from tests.kernels.backend_matrix import BACKENDS, NAMES, TOLERANCE
from tests.kernels.sparse_memory import sparse_memory
from tests.kernels.test_attention import expected
from tests.kernels.test_decoder_layers import SPECS, WIDTH, stack_of

FAR = 2**31
backends = pytest.mark.parametrize("backend", NAMES)

LLAMA = LayerSpec(8, 32, 128, 128, scale=128**-0.5)  # Llama-3.1-8B, whose 32 layers take texts of 131,072 tokens
LAYERS = 32
CONTIGUOUS, RING = Layout(131_072), Layout(131_072, sinks=4, ring=131_068)
ROWS = (CaseRow(2, 1), CaseRow(0, 3))


def _make_case(backend: str, layout: Layout, kept: torch.dtype) -> AttentionCase:
    dtype = torch.float32 if kept is torch.int8 else kept
    before = [LLAMA] * (LAYERS - 1)
    case = AttentionCase(
        BACKENDS[backend](), layout, LLAMA, ROWS, dtype, formats=kept, before=before, memory=sparse_memory
    )
    assert case.store.k_offset(case.layer) // kept.itemsize > FAR
    assert case.store.k(0).stride(0) > FAR, "and so do blocks"
    case.write()
    return case


@pytest.mark.parametrize("layout", [CONTIGUOUS, RING], ids=lambda at: at.kind)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@backends
def test_layers_of_a_long_block_attend_as_the_definition_says(backend: str, kept: torch.dtype, layout: Layout) -> None:
    case = _make_case(backend, layout, kept)
    for i, (out, row) in enumerate(zip(case.attend(), ROWS, strict=True)):
        assert (out.double() - expected(case, i, None)).abs().max() < TOLERANCE[kept]
        k, v = case.ops.gather(case.store, case.layer, case.at, i, torch.arange(row.past + row.tokens))
        assert torch.equal(k, case.k[i])
        assert torch.equal(v, case.v[i])


@backends
def test_so_do_those_in_int8(backend: str) -> None:
    far = _make_case(backend, CONTIGUOUS, torch.int8)
    near = AttentionCase(ReferenceOps(), Layout(16), LLAMA, ROWS, torch.float32, formats=torch.int8)
    near.write()
    for ours, theirs in zip(far.attend(), near.attend(), strict=True):
        assert compute_error(ours, theirs) < 1e-5


@backends
def test_layers_do_not_lie_upon_one_another(backend: str) -> None:
    """Every layer is written before any is read, in two blocks."""
    case = _make_case(backend, CONTIGUOUS, torch.bfloat16)
    kept = []
    for layer in range(LAYERS):
        at, k, v = case.at, *(torch.randn(4, 8, 128).bfloat16() for _ in range(2))
        case.ops.write_kv(case.store, layer, k, v, at)
        kept.append((k, v))
    for layer, (k, v) in enumerate(kept):
        for row, (tokens, positions) in enumerate(((slice(0, 1), [2]), (slice(1, 4), [0, 1, 2]))):
            found = case.ops.gather(case.store, layer, case.at, row, torch.tensor(positions))
            assert torch.equal(found[0], k[tokens])
            assert torch.equal(found[1], v[tokens])


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.int8], ids=str)
@backends
def test_slots_and_heads_that_lie_apart_keep_what_enters(backend: str, kept: torch.dtype) -> None:
    """Writes the last three tokens of a sequence of 2^24 tokens and more; the last one sees them."""
    spec, tokens, ops = LayerSpec(2, 2, 128, 128, window=3), FAR // 128 + 64, BACKENDS[backend]()
    far, near = (KVStore(_pages(spec, length, kept), [spec], length, kept) for length in (tokens, 3))
    assert far.k(0).stride(1) > FAR
    assert (tokens - 1) * far.k(0).stride(2) > FAR, "within a head"
    k, v = (torch.randint(-127, 128, (3, 2, 128)).float() for _ in range(2))
    k[..., 0] = v[..., 0] = 127  # so that int8 keeps all of them
    q, dtype = torch.randn(1, 2, 128) / 127, torch.float32 if kept is torch.int8 else kept
    outs = []
    for store, length in ((far, tokens), (near, 3)):
        at = _row(store, length - 3, 3)
        ops.write_kv(store, 0, k.to(dtype), v.to(dtype), at)
        for found, whole in zip(ops.gather(store, 0, at, 0, torch.arange(length - 3, length)), (k, v), strict=True):
            assert torch.equal(found.float(), whole)
        outs.append(torch.full((1, 2, 128), torch.nan, dtype=dtype))
        ops.attend(outs[-1], q.to(dtype), store, 0, _row(store, length - 1, 1), spec)
    assert torch.equal(far.k(0)[1, :, -3:].transpose(0, 1).float(), k), "where the store says"
    assert not far.k(0)[0, :, -3:].any()
    assert compute_error(*outs) < ATTENTION[dtype]


def _pages(spec: LayerSpec, tokens: int, kept: torch.dtype) -> Pages:
    """Return paged memory of two blocks."""
    page = compute_block_bytes([spec], tokens, kept)
    return Pages(2, page, memory=sparse_memory(2 * page))


def _row(store: KVStore, start: int, n: int) -> Slots:
    """Return the addresses of a row in block 1; of one token it may be a chunk, too."""

    def integers(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    return Slots(
        table=integers(1).view(1, 1),
        block_size=store.block_size,
        table_row=integers(0),
        q_start=integers(0, n),
        start=integers(start),
        num_decode=0,
        max_q=n,
        max_kv=start + n,
    )


@backends
def test_blocks_far_apart_are_copied(backend: str) -> None:
    """Blocks of 64 KiB: the last one begins at 2^36 bytes, which is more than 2^31 units of 16."""
    page, count, ops = 1 << 16, (1 << 20) + 2, BACKENDS[backend]()
    store = KVStore(Pages(count, page, memory=sparse_memory(count * page)), [LayerSpec(2, 2, 16, 8)], 16, torch.float32)
    store.blocks[5] = torch.randint(1, 255, (page,)).byte()
    ops.copy_blocks(store, [5], [count - 1])
    ops.copy_blocks(store, [count - 1], [7])
    for block in (count - 1, 7):
        assert torch.equal(store.blocks[block, : store.block_bytes], store.blocks[5, : store.block_bytes])
    assert not store.blocks[count - 2].any()
    assert not store.blocks[0].any()


@backends
def test_all_layers_in_one_call_have_the_bits_that_they_have_nearby(backend: str) -> None:
    ops, rows = BACKENDS[backend](), (CaseRow(0, 6), CaseRow(0, 6))
    stack, found = stack_of(ops, torch.float32, None), []
    for layout, memory in ((Layout(16), None), (Layout(FAR // 128 + 64), sparse_memory)):
        case = AttentionCase(ops, layout, SPECS[1], rows, torch.float32, before=SPECS[:1], memory=memory)
        x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(0))
        for start, n in ((0, 5), (5, 1)):
            where = KVLocation(case.store, case.make_slots([(row, start, n) for row in range(2)]), None)
            step = Step(ops, SPECS, [(slice(0, 2 * n), where)])
            found.append(ops.forward_layers(stack, x[2 * start :][: 2 * n], step))
        assert memory is None or case.store.k(1).storage_offset() > FAR
    assert torch.equal(torch.cat(found[:2]), torch.cat(found[2:]))
