"""Every kind of strategy generates the same tokens on the CPU and, where there is a card, on CUDA.

CUDA has no kernels of its own: plain torch computes there, with tensors in the card's memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cache_strategies.scorers import BUILTIN
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt

DEVICES = ["cpu", "metal-emulated", *(["cuda"] if torch.cuda.is_available() else [])]
EXACT = strategies(
    blocks_of_7={"kind": "paged", "block_size": 7},
    everything_fits={"kind": "compressed", "budget": 300},
    mirrored={"kind": "mirrored"},
    quest_reads_all={"kind": "quest", "budget": 300},
    whole_window={"kind": "sliding_window", "window": 300, "sinks": 4},
)
LOSSY = strategies(
    quest={"kind": "quest", "block_size": 4, "budget": 16},
    streaming={"kind": "streaming", "window": 24},
    window={"kind": "sliding_window", "window": 20, "sinks": 3},
    **{name: {"kind": "compressed", "scorer": name, "budget": 20, "recent": 8, "every": 64} for name in BUILTIN},
)
LENGTHS = (1, 200, 3, 70, 17, 150)


def generate(directory: Path, instances: list[str], **settings: Any) -> dict[str, list[int]]:
    """Return the tokens of one request under each instance, all in the same steps."""
    driver = Driver(directory, max_seq_len=300, max_num_batched_tokens=60, kv_memory="64MiB", **settings)
    for i, name in enumerate(instances):
        driver.submit(name, random_prompt(LENGTHS[i % len(LENGTHS)], seed=i), 12, kv_cache=name)
    driver.run()
    return {name: heard.tokens for name, heard in driver.heard.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_exact_strategies_generate_the_tokens_of_uncached_attention(
    device: str, tiny: Path, reference: Reference
) -> None:
    instances = ["contiguous", "paged", *EXACT]
    assert generate(tiny, instances, device=device, strategies=EXACT) == {
        name: reference.greedy(random_prompt(LENGTHS[i % len(LENGTHS)], seed=i), 12) for i, name in enumerate(instances)
    }


@pytest.mark.parametrize("device", DEVICES)
def test_strategies_that_drop_keys_generate_the_tokens_of_the_reference_on_the_cpu(device: str, tiny: Path) -> None:
    expected = generate(tiny, list(LOSSY), device="cpu", kernels="reference", strategies=LOSSY)
    assert generate(tiny, list(LOSSY), device=device, strategies=LOSSY) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_int8_keys_and_values_give_the_tokens_of_the_reference_on_the_cpu(device: str, tiny: Path) -> None:
    int8 = strategies(
        paged={"kind": "paged", "kv_dtype": "int8"}, ring={"kind": "sliding_window", "window": 20, "kv_dtype": "int8"}
    )
    expected = generate(tiny, list(int8), device="cpu", kernels="reference", strategies=int8)
    assert generate(tiny, list(int8), device=device, strategies=int8) == expected
