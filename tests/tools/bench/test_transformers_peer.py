"""transformers generates answers of a workload's length, and the times are reported as by `kvmux bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from loadtest.bench.workloads import NAMED_WORKLOADS
from tests.tools.bench.small_shape import SMALL_SHAPE
from tools.bench import transformers_peer as peer
from tools.bench.table.limits import WORKLOADS, Workload


def test_a_result_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(WORKLOADS, "a", Workload(1, 24, 6))
    peer.main(["--model", str(folder / SMALL_SHAPE.name), "--rounds", "2", "--threads", "1"])
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["strategy"], told["phase"], told["requests"], told["prompt_tokens"]) == ("transformers", None, 2, 48)
    assert told["ttft_ms"]["p50"] > 0 < told["itl_ms"]["mean"]


class Eager:
    """A model that generates at once."""

    def __init__(self) -> None:
        self.asked: dict[str, object] = {}

    def generate(self, prompt: torch.Tensor, streamer: peer.Arrivals, max_new_tokens: int, **asked: object) -> None:
        self.asked = asked
        for value in [prompt, *range(max_new_tokens)]:
            streamer.put(torch.tensor(value) if isinstance(value, int) else value)
        streamer.end()


def test_the_prompt_is_no_token_and_every_token_counts() -> None:
    model = Eager()
    times = peer.time_generation(model, torch.zeros(1, 3, dtype=torch.long), 5)
    assert len(times.itl_ms) == 4
    assert times.ttft_ms >= 0
    assert (model.asked["do_sample"], model.asked["min_new_tokens"]) == (False, 5)


def test_only_workloads_of_one_stream_are_offered(capsys: pytest.CaptureFixture[str]) -> None:
    several = next(name for name, workload in NAMED_WORKLOADS.items() if workload.requests > 2)
    with pytest.raises(SystemExit, match="2"):
        peer.main(["--model", "x", "--workload", several])
    assert "invalid choice" in capsys.readouterr().err
