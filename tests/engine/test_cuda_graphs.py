"""Decode steps that are replayed give the tokens of steps that are launched.

The kernels run in the Metal emulator. Instead of a CUDA graph, a captured step is computed again with the tensors that
it had, which is what a graph does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from torch import Tensor

from kernels import backends
from kernels.cuda.graphs import GraphOps
from kernels.metal.library import Kernels
from metal_emulator import compile_shader
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt

STRATEGIES = strategies(
    blocks_of_7={"kind": "paged", "block_size": 7},
    ring={"kind": "sliding_window", "window": 300, "sinks": 4},
    everything_fits={"kind": "compressed", "budget": 300},
)
LENGTHS = (1, 250, 3, 40, 90)  # one of them grows beyond the 256 keys that a threadgroup sums


class Repeats:
    """Captures calls by keeping them, and counts how often they are made again."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        self.captured += 1
        out = call().clone()

        def replay() -> None:
            self.replayed += 1
            out.copy_(call())

        return out.zero_(), replay


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repeats]:
    repeats = Repeats()
    rows = {"metal-emulated": ("metal-emulated", lambda: GraphOps(Kernels(compile_shader), repeats))}
    monkeypatch.setattr(backends, "BACKENDS", rows)
    monkeypatch.setattr(backends, "check_ops", lambda *_: [])
    yield repeats
    backends._check_backend.cache_clear()


def generate(directory: Path, names: Mapping[str, int]) -> Mapping[str, list[int]]:
    """Return the tokens of requests, one under each instance, given with the lengths of their prompts."""
    driver = Driver(directory, device="metal-emulated", strategies=STRATEGIES, max_seq_len=300)
    for name, length in names.items():
        driver.submit(name, random_prompt(length, seed=length), 12, kv_cache=name)
    driver.run()
    return {name: heard.tokens for name, heard in driver.heard.items()}


@pytest.mark.parametrize(
    ("names", "replayed"),
    [
        (("paged",), 5),
        (("contiguous", "paged", "blocks_of_7", "ring"), 5),
        (("everything_fits",), 0),  # its addresses are not checked on the host
    ],
)
def test_replayed_steps_give_the_tokens_of_uncached_attention(
    tiny: Path, reference: Reference, repeats: Repeats, names: tuple[str, ...], replayed: int
) -> None:
    lengths = dict(zip(names, LENGTHS[1:], strict=False))
    found = generate(tiny, lengths)
    assert found == {name: reference.greedy(random_prompt(n, seed=n), 12) for name, n in lengths.items()}
    assert repeats.replayed >= replayed
    assert (repeats.captured > 0) == (replayed > 0)


def test_a_step_that_cannot_be_captured_is_launched(
    tiny: Path,
    reference: Reference,
    repeats: Repeats,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Repeats, "__call__", refuse)
    assert generate(tiny, {"paged": 40}) == {"paged": reference.greedy(random_prompt(40, seed=40), 12)}
    assert caplog.text.count("decode steps are not captured in CUDA graphs") == 1
