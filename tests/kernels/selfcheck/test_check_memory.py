"""The second self-check finds operations that pass in small memory, but fail in the actual KV memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.backends as loading
from config.errors import SettingsError
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.check import check_ops
from kernels.selfcheck.check_memory import find_memory_fault
from kernels.selfcheck.op_db import OPS
from kernels.store import KVStore, Pages, compute_block_bytes
from kernels.types import LayerSpec, Slots
from tests.engine.engine_driver import Driver
from tests.kernels.backend_matrix import BACKENDS, NAMES

LAYERS = [
    LayerSpec(2, 6, 16, 8, scale=0.25),
    LayerSpec(1, 4, 32, 32, window=2, softcap=5.0, sink_logits=torch.tensor([0.0, 1.0, -2.0, 3.0])),
    LayerSpec(2, 2, 16, 16),
]
CPU = torch.device("cpu")


def _store(tokens: int, kept: torch.dtype, pages: int = 7, run: int = 1) -> KVStore:
    page = -(-compute_block_bytes(LAYERS, tokens, kept) // run // 64) * 64
    return KVStore(Pages(pages, page), LAYERS, tokens, kept)


@pytest.mark.parametrize("run", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", NAMES)
def test_what_is_right_passes(backend: str, dtype: torch.dtype, tokens: int, run: int) -> None:
    for kept, block in ((dtype, 7 - run), (torch.int8, 1)):
        assert find_memory_fault(BACKENDS[backend](), _store(tokens, kept, run=run), [block], LAYERS, dtype) is None


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 200])
@pytest.mark.parametrize("kept", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("backend", NAMES)
def test_blocks_of_single_heads_pass(backend: str, kept: torch.dtype, tokens: int) -> None:
    page = compute_block_bytes([spec._replace(num_kv_heads=1) for spec in LAYERS], tokens, kept)
    store = KVStore(Pages(7, page), LAYERS, tokens, kept, split_heads=True)
    assert store.blocks_per_token == 2
    assert find_memory_fault(BACKENDS[backend](), store, [5, 2], LAYERS, torch.float32) is None
    fault = find_memory_fault(BACKENDS[backend](), store, [5, 5], LAYERS, torch.float32)
    assert fault is not None, "one head was written over the other"


class Near(ReferenceOps):
    """One operation places layers after the first `reach` bytes of a block on top of the first layer."""

    def __init__(self, reach: int, *operations: str) -> None:
        super().__init__()
        self._reach, self._operations = reach, operations

    def _of(self, operation: str, store: KVStore, layer: int) -> int:
        return 0 if operation in self._operations and store.k_offset(layer) > self._reach else layer

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, at: Slots) -> None:
        super().write_kv(store, self._of("write_kv", store, layer), k, v, at)

    def gather(self, store: KVStore, layer: int, at: Slots, row: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        return super().gather(store, self._of("gather", store, layer), at, row, positions)

    def attend(self, out: Tensor, q: Tensor, store: KVStore, layer: int, *rest: Any, **keywords: Any) -> None:
        super().attend(out, q, store, self._of("attend", store, layer), *rest, **keywords)


SAME = [LayerSpec(2, 4, 16, 16, scale=0.25)] * 3


@pytest.mark.parametrize(
    ("operations", "found"),
    [
        (("write_kv", "gather", "attend"), "layer 0 of block 6 does not keep what is written at positions from 0 on"),
        (("write_kv",), "layer 0 of block 6 does not keep"),
        (("gather",), "layer 2 of block 6 does not keep"),
        (("attend",), "attend: off by .* of the largest number in layer 2 of block 6"),
    ],
    ids=str,
)
def test_what_is_wrong_far_away_alone_is_found(operations: tuple[str, ...], found: str) -> None:
    ops = Near(1 << 18, *operations)
    assert [verdict.fault for verdict in check_ops(ops, torch.float32, CPU)] == [None] * len(OPS)
    near, far = (
        KVStore(Pages(7, compute_block_bytes(SAME, tokens, torch.float32)), SAME, tokens, torch.float32)
        for tokens in (16, 900)
    )
    assert find_memory_fault(ops, near, [6], SAME, torch.float32) is None
    with pytest.raises(AssertionError, match=found):
        raise AssertionError(find_memory_fault(ops, far, [6], SAME, torch.float32))


class Narrow(ReferenceOps):
    """Operations with offsets of too few bits."""

    def attend(self, out: Tensor, q: Tensor, store: KVStore, layer: int, *rest: Any, **keywords: Any) -> None:
        if store.k_offset(layer) >= 1 << 18:
            raise ValueError(f"{store.k_offset(layer)} cannot be passed in 18 bits")
        super().attend(out, q, store, layer, *rest, **keywords)


def test_an_engine_that_could_answer_nothing_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "BACKENDS", {"cpu-narrow": ("cpu", Narrow)})
    model = Path("tiny")
    with pytest.raises(SettingsError) as caught:
        Driver(model, max_seq_len=300)
    told = str(caught.value)
    assert told.startswith("the kernels (cpu-narrow) fail in the KV memory of 'contiguous': ValueError: 921600 cannot")
    assert told.endswith("lower max_seq_len or kv_memory, or use plain torch with kernels='reference'")
    Driver(model, max_seq_len=300, kernels="reference")
    Driver(model, max_seq_len=30)
