"""A malformed model: one sentence that names the file and, from `kvmux serve`, exit code 2 and no traceback."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from config.errors import SettingsError
from config.settings import Settings
from server.engine.build import build_engine
from server.text.tokenizer import Tokenizer
from tests.cli.startup_errors import SMALL_ENGINE
from tests.models.gguf_files import gguf_model, write_gguf
from tests.models.random_models import save_random_model

USER_ERROR = 2


def _norm_of_nothing(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.empty(0)}, directory / "model.safetensors")


def _with_config(**change: Any) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))

    return spoil


def _cut_off(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def _written(name: str, text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_text(text) and None


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_norm_of_nothing, "tensor 'model.norm.weight' is [0], and by config.json it should be [64] (hidden_size)"),
        (_with_config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000: should be "),
        (_with_config(head_dim=10**9), "(num_attention_heads * head_dim, hidden_size)"),
        (_cut_off, "model.safetensors"),
        (_written("config.json", "[" * 100_000), "cannot read"),
        (_written("tokenizer.json", "{}"), "tokenizer.json is not a tokenizer this server can read"),
        (_written("tokenizer_config.json", '{"added_tokens_decoder": [1]}'), "added_tokens_decoder should have an obj"),
        (_written("tokenizer_config.json", '{"additional_special_tokens": 7}'), "additional_special_tokens should be"),
    ],
)
def test_a_malformed_directory(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    save_random_model("llama", directory)
    spoil(directory)
    with pytest.raises(SettingsError) as refused:
        load(directory)
    told = str(refused.value)
    assert told.count(message) == 1
    assert str(directory) in told
    assert len(told.splitlines()) == 1


def load(directory: Path) -> None:
    """Load what an engine and the processes of the API load."""
    build_engine(Settings(model=str(directory), weights_cache="off", **SMALL_ENGINE))
    Tokenizer.from_directory(directory)


def test_the_command_ends_with_the_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The supervisor prints what the engine's process raises; test_bad_environment.py has such an API process."""
    file = write_gguf(gguf_model("llama"), tmp_path / "a.gguf")
    data = file.read_bytes()
    file.write_bytes(data[:8] + struct.pack("<Q", 2**63) + data[16:])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = ("--model", str(file), "--port", "0", "--host", "127.0.0.1", "--threads", "1")
    command = [sys.executable, "-m", "server", "serve", *flags, "--kv-memory", "16MiB"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False)
    assert "Traceback" not in ran.stdout
    assert ran.returncode == USER_ERROR, ran.stdout
    assert ran.stdout.count(f"{file} is damaged or cut off: fetch it again") == 1
