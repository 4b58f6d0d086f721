"""Every kind of strategy generates the same tokens on each device.

The emulated one refuses what torch refuses on mps. On CUDA plain torch computes, as nothing else is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from cache_strategies.scorers import BUILTIN
from tests.engine.devices import DEVICES
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt
from tests.models.random_models import CONFIGS, save_random_model

EXACT = strategies(
    blocks_of_7={"kind": "paged", "block_size": 7},
    everything_fits={"kind": "compressed", "budget": 300},
    mirrored={"kind": "mirrored"},
    quest_reads_all={"kind": "quest", "budget": 300},
    residual_as_computed={"kind": "residual", "k_dtype": "model", "v_dtype": "model", "residual_length": 20},
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
        paged={"kind": "paged", "k_dtype": "int8", "v_dtype": "int8"},
        residual={"kind": "residual", "residual_length": 20, "k_dtype": "int8", "v_dtype": "int8"},
        ring={"kind": "sliding_window", "window": 20, "k_dtype": "int8", "v_dtype": "int8"},
    )
    expected = generate(tiny, list(int8), device="cpu", kernels="reference", strategies=int8)
    assert generate(tiny, list(int8), device=device, strategies=int8) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_drawn_tokens_and_their_probabilities_are_those_of_the_cpu(device: str, tiny: Path) -> None:
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 3, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "logprobs": 4},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": ((7, 2.0),)},
        {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5, "ignore_eos": False, "min_tokens": 9},
        {"temperature": 1.2, "seed": 7, "logprobs": 0},
    ]
    found = []
    for where in ("cpu", device):
        driver = Driver(tiny, device=where, max_num_batched_tokens=16)
        for i, sampling in enumerate(samplings):
            driver.submit(str(i), random_prompt(30, seed=i), 12, **sampling)
        driver.run()
        found.append({name: heard.tokens for name, heard in driver.heard.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("device", DEVICES)
def test_models_that_transformers_computes_generate_the_tokens_of_the_cpu(device: str, tiny: Path) -> None:
    instances = ["contiguous", "paged", *EXACT]
    options: dict[str, Any] = {"strategies": EXACT, "model_impl": "transformers"}
    assert generate(tiny, instances, device=device, **options) == generate(tiny, instances, device="cpu", **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_transformers_computes_may_sum_more_than_torch_can_on_some_macs(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"num_hidden_layers": 1, "layer_types": None, "intermediate_size": 40_000}
    monkeypatch.setitem(CONFIGS, "wide", Qwen2Config(**(CONFIGS["qwen2"].to_dict() | shape)))
    save_random_model("wide", tmp_path)
    options: dict[str, Any] = {"model_impl": "transformers"}
    assert generate(tmp_path, ["paged"], device=device, **options) == generate(
        tmp_path, ["paged"], device="cpu", **options
    )
