"""`system_fingerprint` is equal after a restart, and different where answers may differ."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from server.engine import info as fingerprint_module
from server.engine.info import compute_fingerprint
from tests.engine.engine_driver import Driver


def of(directory: Path, **settings: Any) -> str:
    return compute_fingerprint(Driver(directory, **settings).engine)


@pytest.fixture
def mine(tiny: Path, tmp_path: Path) -> Path:
    """Return the directory of a copy of the tiny model."""
    return Path(shutil.copytree(tiny, tmp_path / "mine"))


def test_the_same_in_every_start_whatever_changes_no_answer(tiny: Path, mine: Path) -> None:
    first = of(tiny)
    assert first.startswith("fp_")
    assert len(first) == 19
    assert of(tiny) == of(tiny, api_keys=["secret"], port=9, max_queued_requests=5, kv_memory="8MiB") == first
    assert of(mine) == first, "a copy is the same model"


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"weights": "bf16"},
        {"kernels": "reference"},
        {"max_num_batched_tokens": 64},
        {"default_strategy": "contiguous"},
        {"strategies": {"sliding_window": {"kind": "sliding_window", "window": 64}}},
    ],
    ids=str,
)
def test_another_for_settings_that_change_what_is_computed(tiny: Path, settings: dict[str, Any]) -> None:
    assert of(tiny, **settings) != of(tiny)


def test_another_for_another_version(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = of(tiny)
    monkeypatch.setattr(fingerprint_module, "get_versions", lambda: {"version": "another"})
    assert of(tiny) != first


@pytest.mark.parametrize("small", [True, False])
def test_another_for_other_weights_and_not_for_a_copy(mine: Path, monkeypatch: pytest.MonkeyPatch, small: bool) -> None:
    """Weights are compared by content, of large files by parts of it: the time of a file's change does not matter."""
    monkeypatch.setattr(fingerprint_module, "SMALL_FILE_BYTES", 2**24 if small else 2**17)
    first = of(mine)
    weights = next(mine.glob("*.safetensors"))
    os.utime(weights, ns=(1, 1))
    assert of(mine) == first
    bytes_ = bytearray(weights.read_bytes())
    for place in (-1, len(bytes_) // 2):
        bytes_[place - 4096 : place] = bytes(byte ^ 1 for byte in bytes_[place - 4096 : place])
        weights.write_bytes(bytes_)
        assert of(mine) != first, place


def test_another_for_another_chat_template(mine: Path) -> None:
    first = of(mine)
    (mine / "additional_chat_templates").mkdir()
    (mine / "additional_chat_templates" / "tool_use.jinja").write_text("hello")
    assert of(mine) != first


def test_a_file_that_cannot_be_read_is_no_part_of_the_model(mine: Path) -> None:
    first = of(mine)
    (mine / "dangling").symlink_to(mine / "nowhere")
    assert of(mine) == first
