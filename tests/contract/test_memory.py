"""A step writes no more than its tokens, and the addresses of kernels' arguments never change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from config.settings import StrategySettings
from kernels.reference.backend import ReferenceOps
from kernels.store import KVStore
from kernels.types import LayerSpec, Slots
from plugin_kit.driver.steps import Reading, attend, step
from plugin_kit.driver.texts import MODEL, random_text
from server.engine.batch import Batch
from tests.contract.harness import World, every_instance

STRATEGIES = every_instance()


# ---------------------------------------------------------------- what a step writes
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_writes_its_own_tokens_only(name: str) -> None:
    world = World({name: STRATEGIES[name]}, max_seats=2)
    readings = two_sequences(world, name)
    rows = [(readings[0], 1), (readings[1], readings[1].chunk(6))]
    batch = Batch([reading.work(n) for reading, n in rows])
    before = world.copy_memory()
    attend(batch, rows)
    changed = sum(int((old != new).sum()) for old, new in zip(before, world.list_tensors(), strict=True))
    assert changed <= 7 * token_bytes(STRATEGIES[name].kind)


def two_sequences(world: World, name: str) -> list[Reading]:
    readings = [world.open(name, random_text(seed, 90, MODEL)) for seed in (1, 2)]
    for reading, length in zip(readings, (70, 5), strict=True):
        while reading.sequence.length < length:
            step([(reading, min(reading.chunk(20), length - reading.sequence.length))])
    return readings


def token_bytes(kind: str) -> int:
    """Return the bytes of a token's keys and values in float32.

    A mirror has a copy of them for each query head, and `residual` has the latest ones twice.
    """
    copies = {"mirrored": lambda spec: spec.num_q_heads, "residual": lambda spec: spec.num_kv_heads}
    count = copies.get(kind, lambda spec: 0)
    return sum((spec.num_kv_heads + count(spec)) * (spec.head_dim + spec.v_head_dim) * 4 for spec in MODEL)


# ---------------------------------------------------------------- addresses
class Watching(ReferenceOps):
    """Operations that record the addresses of the tensors in `Slots`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, at: Slots) -> None:
        tensors = (at.table, at.table_row, at.q_start, at.start)
        assert all(tensor.dtype is torch.int32 for tensor in tensors)
        self.seen.add(tuple(tensor.data_ptr() for tensor in tensors))
        super().write_kv(store, layer, k, v, at)


@pytest.mark.parametrize("kind", ["contiguous", "paged", "sliding_window"])
def test_slots_keep_their_addresses_for_the_life_of_a_cache(kind: str) -> None:
    ops = Watching()
    world = World({kind: StrategySettings(kind=kind)}, max_seats=4, ops=ops)
    memory = [each.data_ptr() for each in world.list_tensors()]
    for seed in range(3):
        readings = [world.open(kind, random_text(10 * seed + i, 40, MODEL)) for i in range(seed + 2)]
        for sizes in ([17] * 4, [1, 1, 1, 5], [1] * 4):
            step(list(zip(readings, sizes, strict=False)))
        for reading in readings:
            reading.sequence.close()
    assert len(ops.seen) == len(world.caches[kind].stores), "each store has a table"
    assert [each.data_ptr() for each in world.list_tensors()] == memory


# ---------------------------------------------------------------- layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_each_layers_keys_and_values_lie_at_their_own_bytes(kind: str, dtype: torch.dtype) -> None:
    """With the heads of Phi-4 and four layers: what a step wrote is read from raw memory by byte offsets."""
    layers = [LayerSpec(10, 40, 128, 128, scale=128**-0.5)] * 4
    world = World({kind: StrategySettings(kind=kind)}, layers=layers, dtype=dtype, max_seats=2, max_seq_len=64)
    text = random_text(1, 32, layers, dtype)
    other, reading = world.open(kind, random_text(2, 32, layers, dtype)), world.open(kind, text)
    step([(other, 32), (reading, 32)])
    store, block = reading.cache.store, reading.sequence.blocks[0]  # type: ignore[attr-defined]
    (memory,), start = world.list_tensors(), block * store.page_bytes
    assert store.k_offset(0) == 0
    for layer in range(4):
        for offset, part in ((store.k_offset(layer), text.k), (store.v_offset(layer), text.v)):
            size = 10 * store.block_size * 128 * dtype.itemsize
            raw = memory[start + offset : start + offset + size].clone()
            plane = raw.view(dtype).view(10, store.block_size, 128)
            assert torch.equal(plane[:, :32], part[layer].transpose(0, 1))
