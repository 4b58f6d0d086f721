"""GGUF files are measured on both servers, and in each type; a second kvmux and a copied file stand for llama.cpp's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGMLQuantizationType

from server.models.formats.gguf_file import read_header
from tests.models.gguf_files import gguf_model, write_gguf
from tools.bench import gguf_files, gguf_types
from tools.bench.__main__ import main
from tools.bench.gguf_files import count_step_bytes
from tools.peers.servers import OURS, prepare_kvmux
from tools.validation.gguf_files import write_tiny


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("qwen2_tied", True)])
def test_a_step_reads_the_weights_but_an_embedding_of_its_own(name: str, tied: bool, tmp_path: Path) -> None:
    file = write_gguf(gguf_model(name), tmp_path / "a.gguf")
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors}
    assert ("output.weight" not in sizes) == tied
    expected = sum(sizes.values()) - (0 if tied else sizes["token_embd.weight"])
    assert count_step_bytes(read_header(file)) == expected


def measure(tmp_path: Path, *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what a group measures in one turn, by row and variant."""
    file = tmp_path / "it.json"
    assert main([*arguments, "--turns", "1", "--json", str(file)]) == 0
    return {(each["what"], each["variant"]): each for each in json.loads(file.read_text())["rows"]}


@pytest.mark.apart
def test_a_file_is_measured_on_both_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(file := tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
    other = replace(prepare_kvmux(file, "64MiB"), name=gguf_files.THEIRS)
    make_flags = gguf_files.make_flags
    monkeypatch.setattr(gguf_files, "make_flags", lambda _, work: make_flags(OURS, work))
    monkeypatch.setattr(gguf_files, "prepare_llama_cpp", lambda *_: other)
    monkeypatch.setattr(gguf_files, "REAL_MODELS", {"tiny": _FetchedModel(file)})
    found = measure(tmp_path, "gguf_files", "--folder", str(tmp_path))
    for what in ("1 stream", "first token after 1,024", "8 at once", "ready"):
        assert found[what, "kvmux"]["value"] > 0 < found[what, gguf_files.THEIRS]["value"]
    assert found["1 stream", "kvmux"]["limit"] > 0


class _FetchedModel:
    def __init__(self, path: Path) -> None:
        self.path = path


@pytest.mark.apart
def test_each_type_has_its_loss_but_the_file_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(file := tmp_path / "tiny.gguf", GGMLQuantizationType.BF16)

    def quantize(installer: object, source: Path, name: str) -> Path:
        return Path(shutil.copy(file, source.with_name(f"{name}.gguf")))

    monkeypatch.setattr(gguf_types, "_quantize", quantize)
    monkeypatch.setattr(gguf_types.Installer, "ensure", lambda *_: None)
    types = ["--types", "BF16", "copy", "--own-type", "copy"]
    found = measure(tmp_path, "gguf_types", str(file), *types, "--folder", str(tmp_path))
    assert found["file", "BF16"]["value"] == pytest.approx(file.stat().st_size / 1e6)
    assert 15.9 < found["bits a weight", "BF16"]["value"] < 18
    assert abs(found["perplexity", "BF16"]["value"]) < 1
    assert ("perplexity", "copy") not in found
    assert found["1 stream", "copy"]["value"] > 0
