"""Real GGUF files are compared by turns, and a step reads all tensors but an embedding that is only looked up."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from server.models.formats.gguf_file import read_header
from tests.models.gguf_files import gguf_model, write_gguf
from tools.bench.peers.gguf_files import MIB, OURS, THEIRS, WORKLOADS, FileReport, as_text, count_step_bytes


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("qwen2_tied", True)])
def test_a_step_reads_the_weights_but_an_embedding_of_its_own(name: str, tied: bool, tmp_path: Path) -> None:
    file = write_gguf(gguf_model(name), tmp_path / "a.gguf")
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors}
    assert ("output.weight" not in sizes) == tied
    expected = sum(sizes.values()) - (0 if tied else sizes["token_embd.weight"])
    assert count_step_bytes(read_header(file)) == expected


def test_the_table_has_ratios_by_turn_and_the_share_of_a_read(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(bytes(3_000_000))
    report = FileReport(tmp_path / "a.gguf", step_bytes=1_000_000_000, bandwidths=[20e9, 30e9, 40e9])
    report.ready_seconds, report.memory = {OURS: 2.04, THEIRS: 0.52}, {OURS: 700 * MIB, THEIRS: 500 * MIB}
    for work in WORKLOADS:
        report.values[OURS, work.what], report.values[THEIRS, work.what] = [10.0, 24.0, 30.0], [10.0, 12.0, 10.0]
    lines = as_text([report], []).splitlines()
    assert "| a | 1 stream, tokens/s | 24.0 (75%) | 10.0 | 2.00 (1.00 to 3.00) |" in lines
    assert "| a | first token after 1,024, ms | 24.0 | 10.0 | 0.50 (0.33 to 1.00) |" in lines
    assert "| a | 3 | kvmux | 2.0 | 700 |" in lines
    assert "read at 20.0 to 40.0 GB/s" in lines[0]
