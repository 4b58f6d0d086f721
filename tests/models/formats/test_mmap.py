"""Weights are mapped, each by itself: what was packed elsewhere takes no memory in its file's place any more."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from kernels.backends import REFERENCE
from server.models.errors import ModelError
from server.models.formats.mmap import map_bytes
from server.models.load import load_model
from server.models.weights import Safetensors, WeightsConfig
from tests.kernels.backend_matrix import BACKENDS
from tests.models.random_models import save_random_model

CPU = torch.device("cpu")


def bytes_mapped(file: Path) -> int:
    """Of a file, in this process."""
    ranges = re.findall(rf"^(\w+)-(\w+) .* {re.escape(str(file))}$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 256)
    return tmp_path / "file"


@pytest.mark.parametrize(("start", "size"), [(0, 1), (0, 65536), (1, 300), (4095, 2), (40_001, 25_535), (65536, 0)])
def test_bytes_are_those_of_the_file(start: int, size: int, file: Path) -> None:
    assert map_bytes(file, start, size).numpy().tobytes() == file.read_bytes()[start : start + size]


def test_whoever_writes_changes_no_file(file: Path) -> None:
    before = file.read_bytes()
    map_bytes(file, 100, 300).fill_(7)
    assert file.read_bytes() == before


def test_a_file_that_is_gone_or_has_become_short_is_reported(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*there: .*No such file"):
        map_bytes(tmp_path / "there", 0, 1)
    with pytest.raises(ModelError, match=r"cannot read .*file: "):
        map_bytes(file, 65530, 100)


def test_a_mapping_goes_with_what_is_seen_of_it(file: Path) -> None:
    if sys.platform == "linux":  # others do not say
        seen = map_bytes(file, 5000, 8000).view(torch.int16)[100:]
        assert 8000 <= bytes_mapped(file) < 65536
        del seen
        assert bytes_mapped(file) == 0


def test_after_loading_norms_alone_are_mapped(tmp_path: Path) -> None:
    theirs = save_random_model("llama", tmp_path)
    norms = sum(p.dim() == 1 for p in theirs.parameters())
    fast = next((name for name in BACKENDS if name.startswith("cpu-")), REFERENCE)
    model = load_model(
        tmp_path,
        "lean",
        ops=BACKENDS[fast](),
        dtype=torch.float32,
        weights=WeightsConfig(torch.float32),
        device=CPU,
        positions=64,
    )
    if sys.platform == "linux" and fast != REFERENCE:
        embedding = theirs.model.embed_tokens.weight.nbytes
        left = bytes_mapped(tmp_path / "model.safetensors")
        assert 0 < left <= embedding + 2 * mmap.PAGESIZE * (norms + 1), "and an embedding that is looked up"
    assert next(iter(model.weight_formats)) == "float32"


def test_tensors_of_every_kind_of_place_and_type(tmp_path: Path) -> None:
    """safetensors aligns nothing for good: a header of any length, a byte before what is wider."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    tensors = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.randn(3, 5).half(),
        "c": torch.randn(7).bfloat16(),
        "d": torch.randn(2, 2),
        "e": torch.randn(0, 4),
        "f": torch.randint(2**31, (3,)).to(torch.uint32),
        "g": torch.tensor([True]),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"odd": "x" * 3})
    data = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    (tmp_path / "model.safetensors").write_bytes(
        (size + 1).to_bytes(8, "little") + data[8 : 8 + size] + b" " + data[8 + size :]
    )
    stored = Safetensors(tmp_path, torch.float32, CPU)
    for name in "abcdef":
        assert stored.read_tensor(name).dtype is tensors[name].dtype
        assert torch.equal(stored.read_tensor(name).view(torch.uint8), tensors[name].view(torch.uint8))
    with pytest.raises(
        ModelError, match="'g' is of type BOOL: of quantized checkpoints, only MLX's and GGUF files can be"
    ):
        stored.get("g", (1,))
    with pytest.raises(ModelError, match="'a' is of type U8: of quantized"):
        stored.get("a", (3,))
