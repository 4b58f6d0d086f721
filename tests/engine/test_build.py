"""Settings that cannot work are rejected at start with what to change; accepted ones hold what they promise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from cache_strategies.base import KVSequence
from config import settings as configured
from config.errors import SettingsError
from config.settings import Settings
from kernels.device import EMULATED_DEVICES, device_of, get_device
from server.engine import build, device
from server.engine.build import build_engine
from server.engine.device import CORES, choose_device, choose_dtype, choose_threads, choose_weight_format
from server.engine.info import describe_caches, summarize_engine
from server.models.errors import ModelError
from server.models.weights import WeightFormat, WeightsConfig
from tests.engine.engine_driver import Driver, least_memory, strategies
from tests.engine.expected_tokens import Reference, random_prompt

SMALL: dict[str, Any] = {"max_seq_len": 60, "max_num_seqs": 3}
MANY_KINDS: dict[str, Any] = {
    "defaults": {},
    "small_blocks": strategies(paged={"kind": "paged", "block_size": 3}),
    "limits": strategies(
        paged={"kind": "paged", "block_size": 8, "limit": "40%"},
        contiguous={"kind": "contiguous", "limit": "50%"},
        ring={"kind": "sliding_window", "window": 20, "limit": "30%"},
    ),
    "floors": strategies(
        paged={"kind": "paged", "block_size": 8, "floor": "20%", "prefix_cache": False},
        contiguous={"kind": "contiguous", "floor": "10%"},
    ),
    "bytes": strategies(paged={"kind": "paged", "block_size": 4, "floor": "10KiB", "limit": "300KiB"}),
}


def refused(tiny: Path, **settings: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        Driver(tiny, **settings)
    return str(caught.value)


# -------------------------------------------------------------------- memory
@pytest.mark.parametrize("name", MANY_KINDS)
def test_the_least_memory_that_is_told_suffices_and_one_byte_less_does_not(
    tiny: Path, reference: Reference, name: str
) -> None:
    """It suffices if the longest text can be generated under every strategy, all at once."""
    settings = SMALL | {"strategies": MANY_KINDS[name]}
    least = least_memory(tiny, **settings)
    told = refused(tiny, **settings, kv_memory=str(least - 1))
    assert f"kv_memory is {least - 1}, too little for one sequence of max_seq_len=60" in told
    assert f"kv_memory={least};" in told
    driver = Driver(tiny, **settings, kv_memory=str(least))
    for instance in driver.core.instances:
        assert driver.submit(instance, random_prompt(50), 10, kv_cache=instance).failed is None
    driver.run()
    for instance, heard in driver.heard.items():
        if instance != "ring":  # sees 20 tokens
            assert heard.tokens == reference.greedy(random_prompt(50), 10)
    driver.assert_nothing_leaked()


def test_more_memory_than_there_is_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "free_memory", lambda _: 500_000)
    told = refused(tiny, **SMALL, kv_memory="1MiB")
    assert told == "kv_memory is 1MiB, but only 500000 bytes of memory are free: lower it"
    Driver(tiny, **SMALL, kv_memory="400KB")


def test_limits_that_no_memory_can_meet_are_refused(tiny: Path) -> None:
    tight = strategies(paged={"kind": "paged", "limit": "1KiB"})
    assert "no amount of KV memory" in refused(tiny, **SMALL, strategies=tight)


def test_auto_takes_what_all_seats_could_fill_and_no_more(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "free_memory", lambda _: 10**9)
    engine = Driver(tiny, **SMALL, kv_memory="auto").core
    held = [engine.instances["contiguous"].open([5]) for _ in range(4)]
    assert [sequence is not None for sequence in held] == [True, True, True, False]
    assert engine.memory.free_bytes < engine.instances["contiguous"].bytes_for(60)


def test_auto_takes_what_the_least_needs_though_the_seats_could_not_fill_it(tiny: Path) -> None:
    floors = strategies(
        paged={"kind": "paged", "block_size": 4, "floor": "40%"}, contiguous={"kind": "contiguous", "floor": "40%"}
    )
    settings = SMALL | {"max_num_seqs": 1, "strategies": floors}
    assert Driver(tiny, **settings, kv_memory="auto").core.memory.total_bytes == least_memory(tiny, **settings)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_auto_takes_a_share_of_what_is_free(tiny: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr(build, "free_memory", lambda _: 5_000_000)
    driver = Driver(tiny, max_seq_len=500, kv_memory="auto", kv_memory_share=share)
    assert driver.core.memory.total_bytes == int(5_000_000 * share)


def test_auto_says_when_the_share_is_too_small(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = least_memory(tiny, **SMALL)
    monkeypatch.setattr(build, "free_memory", lambda _: 10 * least)
    told = refused(tiny, **SMALL, kv_memory="auto", kv_memory_share=0.05)
    assert re.match(r"kv_memory=auto gives \d+ bytes \(5% of the free memory\), too little", told)
    assert f"kv_memory={least};" in told
    Driver(tiny, **SMALL, kv_memory="auto", kv_memory_share=0.2)


@pytest.mark.parametrize("name", MANY_KINDS)
def test_the_capacity_that_is_told_is_what_fits(tiny: Path, name: str) -> None:
    settings = SMALL | {"strategies": MANY_KINDS[name], "max_num_seqs": 50}
    driver = Driver(tiny, **settings, kv_memory=str(3 * least_memory(tiny, **settings)))
    for told in summarize_engine(driver.engine)["strategies"]:
        cache = driver.core.instances[told["name"]]
        opened: list[KVSequence] = []
        while (sequence := cache.open(random_prompt(60, seed=len(opened)))) is not None:
            opened.append(sequence)
        assert told["capacity_tokens"] == 60 * len(opened), told["name"]
        for sequence in opened:
            sequence.close()


# -------------------------------------------------------------------- device and types
def test_a_device_that_torch_does_not_offer_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert refused(tiny, device="cuda") == "device 'cuda' is not usable here; torch offers cpu"
    assert refused(tiny, device="mps") == "device 'mps' is not usable here; torch offers cpu"
    assert choose_device("auto") == device_of("cpu")


@pytest.mark.parametrize(("cuda", "mps", "best"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")])
def test_auto_takes_the_fastest_device(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, best: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert choose_device("auto") == device_of(best)
    assert choose_device("cpu") == device_of("cpu")


def test_every_device_that_can_be_set_is_one() -> None:
    assert {"auto", "cpu", "cuda", "mps", *EMULATED_DEVICES} == {*get_args(configured.Device)}


AUTO_DTYPES = [  # device, of the checkpoint, fast bfloat16 on the CPU -> what is computed in
    ("cpu", "bfloat16", True, torch.bfloat16),
    ("cpu", "bfloat16", False, torch.float32),
    ("cpu", "float16", True, torch.float32),
    ("cpu", "float32", True, torch.float32),
    ("mps", "float16", False, torch.float16),
    ("cuda", "bfloat16", False, torch.bfloat16),
    ("metal-emulated", "bfloat16", False, torch.bfloat16),
    ("metal-checked", "float16", False, torch.float16),
]


@pytest.mark.parametrize(("where", "checkpoint", "fast", "expected"), AUTO_DTYPES)
def test_auto_takes_the_checkpoints_type_where_the_device_is_fast_at_it(
    monkeypatch: pytest.MonkeyPatch, where: str, checkpoint: str, fast: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(device, "fast_half_dtypes", lambda: frozenset({torch.bfloat16} if fast else ()))
    assert choose_dtype("auto", checkpoint, get_device(where)) is expected
    assert choose_dtype("float16", checkpoint, get_device(where)) is torch.float16
    assert choose_weight_format(Settings(), expected) == WeightsConfig(expected, as_stored=True)
    assert choose_weight_format(Settings(weights="bf16"), expected) == WeightsConfig(torch.bfloat16)
    quantized = choose_weight_format(Settings(weights="int4", weights_cache="off"), expected)
    assert quantized == WeightsConfig(expected, WeightFormat("int4", "Q4_K", "Q6_K"), as_stored=True)


def test_quantized_weights_wait_in_the_users_cache_or_where_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = {None: tmp_path / "kvmux" / "weights", "off": None, "": None, "~/there": Path.home() / "there"}
    for wanted, expected in told.items():
        settings = Settings(weights="int8", weights_cache=wanted)
        assert choose_weight_format(settings, torch.float32).cache_dir == expected


@pytest.mark.parametrize("checkpoint", ["float64", "int8", "nonsense", "Tensor"])
def test_a_checkpoint_of_another_type_is_refused(checkpoint: str) -> None:
    with pytest.raises(SettingsError, match=f"the checkpoint's dtype '{checkpoint}' is not supported for comp"):
        choose_dtype("auto", checkpoint, device_of("cuda"))


# -------------------------------------------------------------------- everything else
def test_a_context_longer_than_the_models_is_refused(tiny: Path) -> None:
    told = refused(tiny, max_seq_len=513)
    assert told == "max_seq_len is 513, but the model has 512 positions: lower it"
    driver = Driver(tiny, max_seq_len=512)
    heard = driver.submit("r", random_prompt(500), 12)
    driver.run()
    assert len(heard.tokens) == 12
    assert Driver(tiny).engine.max_seq_len == 512


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    (
        {"kind": "paged", "blocksize": 4},
        r"strategies.mine.blocksize is not an option.*are: block_size, center, eviction, hadamard, k_dtype, prefix",
    ),
    (
        {"kind": "contiguous", "window": 4},
        r"strategies.mine.window is not an option.*its options are: center, hadamard, k",
    ),
    ({"kind": "paged", "block_size": 0}, r"strategies.mine.block_size: .*should be 1 or more"),
    ({"kind": "sliding_window", "window": "wide"}, r"strategies.mine.window: .*whole number"),
    ({"kind": "page"}, r"there is no cache strategy kind 'page'; kinds are compressed, .*paged"),
]


@pytest.mark.parametrize(("options", "pattern"), UNKNOWN, ids=lambda value: str(value)[:40])
def test_unknown_kinds_and_options_are_refused_by_name(tiny: Path, options: dict[str, Any], pattern: str) -> None:
    assert re.search(pattern, refused(tiny, strategies={"mine": options}))


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        build_engine(Settings(model=str(tmp_path)))
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"is a directory with GGUF files: name one of them, such as .*b\.gguf"):
        build_engine(Settings(model=str(tmp_path)))


def test_the_summary_tells_where_it_runs(tiny: Path) -> None:
    engine = Driver(tiny, **SMALL, model_name="mine").engine
    told = summarize_engine(engine)
    assert (told["model"], told["device"], told["dtype"], told["max_seq_len"]) == ("mine", "cpu", "float32", 60)
    assert told["kv_memory_bytes"] == engine.core.memory.total_bytes <= 12 * 2**20
    assert [s["name"] for s in told["strategies"]] == ["paged", "contiguous", "sliding_window"]
    msgspec.json.encode(told)


FIGURES: list[Callable[[dict[str, Any]], object]] = [
    lambda told: told["floor_bytes"] == 0,
    lambda told: told["limit_bytes"] == told["usage"]["limit"],
    lambda told: told["options"]["block_size"] == 32,
    lambda told: told["contract"]["exact"] is True,
    lambda told: told["usage"]["reserved"] == sum(told["usage"][part] for part in ("used", "idle", "wasted")),
    lambda told: told["usage"]["seats"] == 1,
]


def test_the_description_of_caches_is_json_and_tells_what_is_in_them(tiny: Path) -> None:
    driver = Driver(tiny, strategies=strategies(paged={"kind": "paged", "limit": "50%"}))
    driver.submit("r", random_prompt(40), 3, kv_cache="paged")
    driver.step()
    described = describe_caches(driver.engine)
    paged = next(told for told in described if told["name"] == "paged")
    assert all(figure(paged) for figure in FIGURES), paged
    assert paged["usage"]["limit"] == driver.core.memory.total_bytes // 2
    msgspec.json.encode(described)


def test_a_small_model_leaves_a_core_to_http() -> None:
    assert choose_threads(None, 1 << 30) == CORES
    assert choose_threads(None, 1 << 20) == max(1, CORES - 1)
    assert choose_threads(3, 1 << 20) == 3
