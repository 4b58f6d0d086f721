"""Decodes sequences under one strategy without computing their prompts, and measures the steps.

The forward pass and what the strategy does before and after it are measured; drawing tokens, scheduling and HTTP are
left out. Keys and values are random numbers, since the time of a step hardly depends on them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from cache_strategies.base import KVSequence, Rows
from config.errors import SettingsError
from server.engine.batch import Batch, RowInput
from server.engine.instance import Instance
from server.engine.instance_reports import read_usage
from server.models.base import Model
from tools.bench.kernel_inputs import fill_at_random

ROW_TOKENS = 256  # tokens that are entered at once
WARMUP_STEPS = 5  # of each turn


class StepTime(NamedTuple):
    """The seconds of one decode step."""

    total: float
    commit: float  # for committing the tokens and compacting, a part of the total


class Turn(NamedTuple):
    """What was measured in one turn of a strategy."""

    total: float  # seconds
    commits: float  # seconds of commits and compactions, a part of the total
    kv_bytes: int  # in use by all sequences at the end


def take_turn(model: Model, instance: Instance, prompts: Sequence[Sequence[int]], steps: int) -> Turn:
    """Decode `steps` tokens after each prompt, under one strategy. Raises SettingsError for lack of memory."""
    with opened_sequences(instance, prompts) as sequences:
        for _ in range(WARMUP_STEPS):
            decode_step(model, instance, sequences)
        times = [decode_step(model, instance, sequences) for _ in range(steps)]
        total, commits = (sum(seconds) for seconds in zip(*times, strict=True))
        return Turn(total, commits, read_usage(instance).used)


@contextmanager
def opened_sequences(instance: Instance, prompts: Sequence[Sequence[int]]) -> Iterator[list[KVSequence]]:
    """Yield sequences that hold these prompts, and close them at the end. Raises SettingsError for lack of memory."""
    sequences: list[KVSequence] = []
    try:
        for prompt in prompts:
            sequences.append(open_sequence(instance, prompt))
            enter(instance, sequences[-1], prompt)
        _fill_at_random(instance)
        yield sequences
    finally:
        for sequence in sequences:
            instance.close(sequence)


def _fill_at_random(instance: Instance) -> None:
    """Fill the blocks that a strategy holds with random keys and values."""
    regions = instance.memory.list_regions(instance.name)
    for store in dict.fromkeys(instance.strategy.stores):
        (held,) = (region.placement.list_used() for region in regions if region.memory is store.memory)
        fill_at_random(store, held)


def open_sequence(instance: Instance, prompt: Sequence[int]) -> KVSequence:
    """Return a sequence for a prompt, whose first tokens may be found in the cache."""
    sequence = instance.open(prompt)
    if sequence is None:
        raise no_room(instance)
    return sequence


def enter(instance: Instance, sequence: KVSequence, prompt: Sequence[int]) -> None:
    """Commit the tokens of a prompt to a sequence, without computing them."""
    while sequence.length < len(prompt):
        most = ROW_TOKENS if sequence.stop is None else sequence.stop - sequence.length
        n = min(len(prompt) - sequence.length, ROW_TOKENS, most)
        if not sequence.reserve(n):
            raise no_room(instance)
        instance.strategy.locate(Rows([sequence], [n]))
        sequence.commit(prompt[sequence.length : sequence.length + n])
        sequence.compact()


@torch.inference_mode()
def decode_step(model: Model, instance: Instance, sequences: Sequence[KVSequence]) -> StepTime:
    """Decode one token of each sequence."""
    begin = time.perf_counter()
    for sequence in sequences:
        if not sequence.reserve(1):
            raise no_room(instance)
    rows = [RowInput(instance, each, each.length, [each.length % 256], 1) for each in sequences]
    batch = Batch(rows, model.device)
    model.forward(batch.input_ids, batch)
    committing = time.perf_counter()
    failed = batch.commit()
    assert not failed, failed
    end = time.perf_counter()
    return StepTime(end - begin, end - committing)


def no_room(instance: Instance) -> SettingsError:
    """Return the error for a strategy whose memory is full."""
    return SettingsError(f"no room under {instance.name}: raise --kv-memory, or decode fewer or shorter sequences")
