"""A step of a GGUF file reads all tensors but an embedding that is only looked up."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from server.models.formats.gguf_file import read_header
from tests.models.gguf_files import gguf_model, write_gguf
from tools.bench.gguf_files import count_step_bytes


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("qwen2_tied", True)])
def test_a_step_reads_the_weights_but_an_embedding_of_its_own(name: str, tied: bool, tmp_path: Path) -> None:
    file = write_gguf(gguf_model(name), tmp_path / "a.gguf")
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors}
    assert ("output.weight" not in sizes) == tied
    expected = sum(sizes.values()) - (0 if tied else sizes["token_embd.weight"])
    assert count_step_bytes(read_header(file)) == expected
