"""Presets: ready choices of a strategy, as tables of the settings and as the server's default."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from cache_strategies.registry import compute_least_bytes, resolve_instances
from cache_strategies.types import Geometry
from config.presets import PRESETS
from config.settings import Settings, StrategySettings
from kernels.types import LayerSpec

LLAMA = Geometry([LayerSpec(8, 32, 64, 64)] * 4, torch.bfloat16, 4, 4096, 512)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_an_instance_that_a_model_can_have(name: str) -> None:
    settings = StrategySettings.model_validate({"preset": name})
    (declared,) = resolve_instances({name: settings})
    assert declared.kind == PRESETS[name].settings["kind"]
    assert compute_least_bytes([declared], LLAMA, lambda size: size) > 0


def test_small_takes_what_it_says_of_the_memory_of_exact() -> None:
    least = [
        compute_least_bytes(resolve_instances({"it": StrategySettings.model_validate({"preset": name})}), LLAMA, int)
        for name in ("small", "exact")
    ]
    assert least[0] / least[1] == pytest.approx(0.4, abs=0.02)


def test_an_instance_overrides_options_of_its_preset() -> None:
    given = StrategySettings.model_validate({"preset": "small", "k_dtype": "int4", "limit": "50%"})
    assert given.kind == "paged"
    assert given.options == {"k_dtype": "int4", "v_dtype": "int4"}
    assert given.limit == "50%"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"preset": "tiny"}, "there is no preset 'tiny'; presets are exact, small, long"),
        ({"preset": "small", "kind": "contiguous"}, "preset 'small' is of kind 'paged'; leave out kind, or the preset"),
    ],
)
def test_a_wrong_preset_is_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Settings(strategies={"mine": given})  # type: ignore[dict-item]


def test_the_servers_preset_serves_requests_that_name_no_instance() -> None:
    settings = Settings(preset="small")
    assert settings.default_strategy == "small"
    assert settings.strategies["small"].options == {"k_dtype": "int8", "v_dtype": "int4"}
    assert Settings().default_strategy == "paged"
    own = Settings(preset="small", strategies={"small": {"preset": "small", "block_size": 64}})  # type: ignore[dict-item]
    assert own.strategies["small"].options["block_size"] == 64
    assert Settings(preset="small", default_strategy="paged").default_strategy == "paged"


@pytest.mark.parametrize("own", [{"kind": "quest"}, {"kind": "paged", "k_dtype": "int8"}])
def test_another_instance_with_the_presets_name_is_refused(own: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r'add preset = "small" to the table'):
        Settings(preset="small", strategies={"small": own})  # type: ignore[dict-item]


def test_a_built_in_instance_may_have_a_preset() -> None:
    settings = Settings(strategies={"paged": {"preset": "long"}})  # type: ignore[dict-item]
    assert settings.strategies["paged"].kind == "quest"
