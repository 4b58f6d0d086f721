"""Tests of devices by name: what an engine reports, which devices it rejects, how much memory it uses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from config.errors import SettingsError
from config.settings import Settings
from kernels import backends as loading
from kernels.backends import load_ops
from kernels.device import KernelsMissing, device_of, get_device
from kernels.ops import Attention, Ops
from kernels.reference.backend import ReferenceOps
from server.cli.banner import format_banner
from server.engine import build
from server.engine.build import build_engine
from server.engine.device import (
    METAL_MARGIN,
    choose_device,
    choose_dtype,
    choose_max_batched_tokens,
    free_memory,
    limit_memory,
)
from server.engine.info import make_engine_info, summarize_engine
from server.models.decoder import Decoder
from tests.engine.emulated_mps import MPS, DeviceUse
from tests.engine.engine_driver import Driver
from tests.engine.expected_tokens import Reference, random_prompt


class Emulated(ReferenceOps):
    """A device that is emulated with another's kernels."""


def no_compiler() -> Ops:
    raise KernelsMissing("there is no C++ compiler: install g++ or clang")


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Replace all backends by the given ones: name=(device, load)."""
    loading._check_backend.cache_clear()
    yield lambda **rows: monkeypatch.setattr(loading, "BACKENDS", rows)
    loading._check_backend.cache_clear()


# -------------------------------------------------------------------- emulated ones
@pytest.mark.parametrize("name", ["metal-emulated", "metal-checked"])
def test_an_emulated_device_goes_by_its_name_and_computes_with_its_kernels(
    tiny: Path, reference: Reference, backends: Callable[..., None], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    backends(**{"cpu-fast": ("cpu", ReferenceOps), name: (name, Emulated)})
    with caplog.at_level(logging.INFO):
        driver = Driver(tiny, device=name)
    assert f"compiling (unless cached) and checking the kernels for {name} ..." in caplog.messages
    assert isinstance(driver.engine.kernels.ops, Emulated)
    assert driver.core.memory.space.device.type == driver.core.model.device.type == "privateuseone"
    told = summarize_engine(driver.engine)
    assert (told["device"], told["kernels"]) == (name, name)
    assert f"float32 on {name};" in format_banner("http://x", driver.engine.settings, told)
    shown = make_engine_info(driver.engine)
    assert (shown.settings["device"], shown.settings["kernels"]) == (name, name)
    assert shown.backends["attend"] == name
    heard = driver.submit("it", random_prompt(20), 6)
    driver.run()
    assert heard.tokens == reference.greedy(random_prompt(20), 6)


def test_without_its_kernels_an_emulated_device_is_refused(tiny: Path, backends: Callable[..., None]) -> None:
    backends(**{"cpu-fast": ("cpu", ReferenceOps), "metal-emulated": ("metal-emulated", no_compiler)})
    with pytest.raises(SettingsError) as caught:
        Driver(tiny, device="metal-emulated")
    assert (
        str(caught.value)
        == "device 'metal-emulated' is not usable here: there is no C++ compiler: install g++ or clang"
    )
    with pytest.raises(KernelsMissing, match=r"they do not compute in torch\.float64"):
        load_ops(get_device("metal-emulated"), torch.float64)
    driver = Driver(tiny, device="metal-emulated", kernels="reference")
    assert (summarize_engine(driver.engine)["device"], summarize_engine(driver.engine)["kernels"]) == (
        "metal-emulated",
        "plain torch",
    )


def test_an_emulated_device_is_taken_by_nobody_who_did_not_name_it(backends: Callable[..., None]) -> None:
    backends(**{"metal-emulated": ("metal-emulated", Emulated)})
    assert choose_device("auto").name in ("cuda", "mps", "cpu")
    assert load_ops(device_of("cpu"), torch.float32).description == "plain torch"


def test_it_computes_in_the_checkpoints_own_type_and_in_steps_for_a_cpu() -> None:
    assert choose_dtype("auto", "bfloat16", get_device("metal-emulated")) is torch.bfloat16
    assert (
        choose_max_batched_tokens(None, get_device("metal-emulated"))
        == choose_max_batched_tokens(None, device_of("cpu"))
        == 512
    )
    assert choose_max_batched_tokens(None, device_of("mps")) == 1024


def test_mps_without_kernels_uses_plain_torch_and_says_so(
    tiny: Path,
    reference: Reference,
    mps: DeviceUse,
    backends: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    backends(metal=("mps", no_compiler))
    driver = Driver(tiny, device="mps")
    assert summarize_engine(driver.engine)["kernels"] == "plain torch"
    assert "there are no kernels for torch.float32 on mps: plain torch is used, which is slower" in caplog.messages
    heard = driver.submit("it", random_prompt(20), 6)
    driver.run()
    assert heard.tokens == reference.greedy(random_prompt(20), 6)


# -------------------------------------------------------------------- memory
def test_on_mps_a_margin_of_what_metal_recommends_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 5 << 30)
    for used, free in ((0, (5 << 30) - METAL_MARGIN), (4 << 30, (1 << 30) - METAL_MARGIN), (6 << 30, 0)):
        monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda used=used: used)
        assert free_memory(MPS) == free


def test_torch_is_told_to_take_no_more_than_metal_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", told.append)
    for device in ("cpu", "mps"):
        limit_memory(get_device(device))
    assert told == [1.0]


def test_kv_memory_beyond_it_is_refused(tiny: Path, mps: DeviceUse) -> None:
    free = free_memory(MPS)
    with pytest.raises(SettingsError, match=f"kv_memory is 5GiB, but only {free} bytes of memory are free: lower it"):
        Driver(tiny, device="mps", kv_memory="5GiB")


def test_the_kv_memory_is_a_share_of_what_weights_and_the_largest_step_leave(
    tiny: Path, mps: DeviceUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    for name in ("limit_memory", "load_model", "run_dummy_step", "free_memory", "make_memory"):
        monkeypatch.setattr(build, name, partial(_noted, taken, name, getattr(build, name)))
    monkeypatch.setattr(build, "free_memory", lambda _: taken.append("free_memory") or 10_000_000)
    driver = Driver(tiny, device="mps", kv_memory="auto", kv_memory_share=0.5, max_seq_len=200)
    assert taken == ["limit_memory", "load_model", "run_dummy_step", "free_memory", "make_memory"]
    assert driver.core.memory.total_bytes == 5_000_000


def _noted(taken: list[str], name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    taken.append(name)
    return function(*args, **kwargs)


def test_no_step_is_larger_than_the_one_that_was_rehearsed(
    tiny: Path, mps: DeviceUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, int]] = []  # tokens, rows of logits
    forward = Decoder.forward

    def noted(self: Decoder, ids: Tensor, attention: Attention) -> Tensor:
        steps.append((len(ids), len(attention.logit_index)))
        return forward(self, ids, attention)

    monkeypatch.setattr(Decoder, "forward", noted)
    driver = Driver(tiny, device="mps", max_num_seqs=4, max_num_batched_tokens=40)
    assert len(steps) == 1
    for i in range(8):
        driver.submit(str(i), random_prompt(50 + i), 4, prompt_logprobs=i % 2 or None)
    driver.run()
    (most_tokens, most_rows), *others = steps
    assert max(tokens for tokens, _ in others) in range(40, most_tokens + 1)
    assert max(rows for _, rows in others) in range(30, most_rows + 1)


@pytest.mark.parametrize(
    ("what", "torch_says", "message"),
    [
        ("load_model", "MPS backend out of memory", "the model is too large for the device's memory: use a smaller"),
        (
            "run_dummy_step",
            "MPS backend out of memory",
            "a step of 64 tokens is too large for the device's memory: lower max",
        ),
        (
            "make_memory",
            "Invalid buffer size: 9.00 GiB",
            "KV memory of .* is too large for the device's memory: lower kv_m",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_what_to_change(
    tiny: Path, mps: DeviceUse, monkeypatch: pytest.MonkeyPatch, what: str, torch_says: str, message: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(torch_says)

    monkeypatch.setattr(build, what, fails)
    with pytest.raises(SettingsError, match=message):
        build_engine(Settings(model=str(tiny), device="mps", max_num_batched_tokens=64))
