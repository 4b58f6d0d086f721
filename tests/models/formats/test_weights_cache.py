"""What was quantized is there at the next start, and only while it is still the same checkpoint."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.reference.backend import ReferenceOps
from kernels.weights.quantizers import quantize_blocks
from server.engine.device import WEIGHT_FORMATS as FORMATS
from server.models.base import Model
from server.models.errors import ModelError
from server.models.files.atomic_directory import PREFIX
from server.models.formats import quantized, weights_cache
from server.models.formats.weights_cache import CachedWeightsWriter, get_cache_folder, open_cached_weights
from server.models.load import load_model
from server.models.no_cache import NoCacheAttention
from server.models.weights import WeightsConfig
from tests.models.gguf_files import gguf_model, write_gguf
from tests.models.mlx_files import write_mlx
from tests.models.random_models import CONFIGS, random_model, save_random_model

CPU = torch.device("cpu")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "some" / "cache"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_random_model("qwen2_tied", tmp_path / "model")
    return tmp_path / "model"


def loaded(directory: Path, home: Path | None, format: str = "int4") -> Model:
    kept = WeightsConfig(torch.float32, FORMATS[format], as_stored=True, cache_dir=home)
    return load_model(
        directory, "auto", ops=ReferenceOps(), dtype=torch.float32, weights=kept, device=CPU, positions=512
    )


@torch.inference_mode()
def logits(model: Model) -> torch.Tensor:
    ids = torch.arange(2, 40)
    attention = NoCacheAttention(model.layer_specs, len(ids), CPU)
    attention.logit_index = attention.positions
    return model.forward(ids, attention)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of what was quantized."""
    seen: list[torch.Size] = []

    def watched(weight: torch.Tensor, format: str) -> Any:
        seen.append(weight.shape)
        return quantize_blocks(weight, format)

    monkeypatch.setattr(quantized, "quantize_blocks", watched)
    return seen


def files(home: Path) -> list[Path]:
    return sorted(path.relative_to(home) for path in home.rglob("*") if path.is_file())


# -------------------------------------------------------------------- what is found again
@pytest.mark.parametrize("format", FORMATS)
def test_the_second_start_quantizes_nothing(
    format: str, checkpoint: Path, home: Path, rounds: list[torch.Size], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        first = loaded(checkpoint, home, format)
        count = len(rounds)
        second = loaded(checkpoint, home, format)
    assert len(rounds) == count > 0
    assert torch.equal(logits(second), logits(first))
    assert torch.equal(logits(first), logits(loaded(checkpoint, None, format)))
    folder = home / files(home)[0].parent
    assert caplog.messages == [
        f"the quantized weights are cached in {folder} for the next start",
        f"reading quantized weights from {folder}",
    ]


def test_every_kind_of_checkpoint(tmp_path: Path, home: Path, rounds: list[torch.Size]) -> None:
    """Rows that are no whole blocks, which are not quantized; experts; what MLX had quantized otherwise."""
    config = CONFIGS["llama"].__class__(**(CONFIGS["llama"].to_dict() | {"intermediate_size": 87}))
    random_model(config).save_pretrained(tmp_path / "odd")
    save_random_model("mixtral", tmp_path / "mixtral")
    write_mlx(random_model(CONFIGS["llama"]), tmp_path / "mlx", 8, 32)
    for name in ("odd", "mixtral", "mlx"):
        first = loaded(tmp_path / name, home)
        count = len(rounds)
        assert torch.equal(logits(loaded(tmp_path / name, home)), logits(first))
        assert len(rounds) == count > 0
    assert len({file.parent for file in files(home)}) == 3


def test_a_gguf_file_too(tmp_path: Path, home: Path, rounds: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from server.models.files.directory import locate

    file = write_gguf(gguf_model("llama"), tmp_path / "a.gguf")
    first = loaded(locate(str(file)), home)
    count = len(rounds)
    assert torch.equal(logits(loaded(locate(str(file)), home)), logits(first))
    assert len(rounds) == count > 0


def test_a_large_model_is_written_in_parts(
    checkpoint: Path, home: Path, rounds: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_cache, "SHARD", 20_000)
    first = loaded(checkpoint, home)
    assert len(files(home)) > 2
    count = len(rounds)
    assert torch.equal(logits(loaded(checkpoint, home)), logits(first))
    assert len(rounds) == count


def test_formats_do_not_mix(checkpoint: Path, home: Path) -> None:
    both = {format: logits(loaded(checkpoint, home, format)) for format in FORMATS}
    for format, expected in both.items():
        assert torch.equal(logits(loaded(checkpoint, home, format)), expected)
    assert not torch.equal(*both.values())


# -------------------------------------------------------------------- what is not
def _another(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: tensor.flip(0) for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _one_number(directory: Path) -> None:
    """In place, in the last byte but some."""
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(-4000, os.SEEK_END)
        file.write(bytes(400))


def _replaced(directory: Path) -> None:
    """By a file of another checkpoint, moved there."""
    save_random_model("qwen2_tied", directory / "other", seed=1)
    (directory / "other" / "model.safetensors").replace(directory / "model.safetensors")


@pytest.mark.parametrize("change", [_another, _one_number, _replaced])
def test_a_changed_checkpoint_is_quantized_anew(
    change: Callable[[Path], None], checkpoint: Path, home: Path, rounds: list[torch.Size]
) -> None:
    """Though its size, and the time that it says it was written, are the same."""
    file = checkpoint / "model.safetensors"
    loaded(checkpoint, home)
    before, old = file.stat(), files(home)
    change(checkpoint)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    count = len(rounds)
    changed = loaded(checkpoint, home)
    assert len(rounds) == 2 * count
    assert torch.equal(logits(changed), logits(loaded(checkpoint, None)))
    assert len(files(home)) == len(old)
    assert files(home) != old, "what was kept of the old one is gone"


def test_a_checkpoint_that_changes_meanwhile_is_not_kept(
    checkpoint: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(weight: torch.Tensor, format: str) -> Any:
        (checkpoint / "model.safetensors").touch()
        return quantize_blocks(weight, format)

    monkeypatch.setattr(quantized, "quantize_blocks", changing)
    loaded(checkpoint, home)
    assert not home.exists()


def test_a_model_that_cannot_be_loaded_leaves_nothing(
    checkpoint: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_cache, "SHARD", 20_000)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"].fill_(torch.nan)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(ModelError, match="NaN"):
        loaded(checkpoint, home)
    assert list(home.iterdir()) == []


def test_what_is_damaged_is_reported_and_made_anew(
    checkpoint: Path, home: Path, rounds: list[torch.Size], caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(loaded(checkpoint, home))
    count = len(rounds)
    file = home / files(home)[0]
    file.write_bytes(file.read_bytes()[:-1000])
    assert torch.equal(logits(loaded(checkpoint, home)), expected)
    assert "the cached quantized weights are damaged; quantizing the weights again: cannot read" in caplog.text
    assert torch.equal(logits(loaded(checkpoint, home)), expected)
    assert len(rounds) == 2 * count


def test_what_a_killed_start_had_not_finished_goes(checkpoint: Path, home: Path) -> None:
    (home / f"{PREFIX}killed").mkdir(parents=True)
    (home / f"{PREFIX}killed" / "00000.safetensors").touch()
    loaded(checkpoint, home)
    assert list(home.iterdir()) == [get_cache_folder(home, checkpoint, FORMATS["int4"]).parent]


# -------------------------------------------------------------------- where nothing can be kept
def test_a_folder_that_cannot_be_is_reported(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").touch()
    expected = logits(loaded(checkpoint, None))
    assert torch.equal(logits(loaded(checkpoint, tmp_path / "taken" / "cache")), expected)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith("cannot cache quantized weights, so the next start quantizes again: [Errno")
    assert record.message.endswith("give --weights-cache another folder, or off")


def test_a_full_disk_is_reported_once_and_leaves_nothing(
    checkpoint: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[Path] = []

    def filling(tensors: dict[str, torch.Tensor], file: Path) -> None:
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(file)
        save_file(tensors, file)

    monkeypatch.setattr(weights_cache, "SHARD", 20_000)
    monkeypatch.setattr(weights_cache, "save_file", filling)
    assert torch.equal(logits(loaded(checkpoint, home)), logits(loaded(checkpoint, None)))
    (message,) = caplog.messages
    assert "No space left on device" in message
    assert list(home.iterdir()) == []


def test_two_servers_may_start_at_once(checkpoint: Path, home: Path) -> None:
    folder = get_cache_folder(home, checkpoint, FORMATS["int4"])
    weight = quantize_blocks(torch.randn(6, 64), "Q5_0")
    drafts = [CachedWeightsWriter(folder), CachedWeightsWriter(folder)]
    for draft in drafts:
        draft.put("a", weight)
    assert open_cached_weights(folder) is None
    for draft in drafts:
        draft.publish()
        draft.close()
        stored = open_cached_weights(folder)
        assert stored is not None
        got = stored.get("a")
        assert got is not None
        assert got.format == weight.format
        assert torch.equal(got.blocks, weight.blocks)
        assert stored.get("b") is None
    assert [path for path in home.iterdir() if path != folder.parent] == []


# -------------------------------------------------------------------- what is in disorder
def _lost(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def _no_file(folder: Path) -> None:
    (folder / "99999.safetensors").mkdir()


def _of_another(folder: Path) -> None:
    """A file more, which has a tensor of one of those names, of another model."""
    tensors = load_file(folder / "00000.safetensors")
    save_file({name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}, folder / "extra.safetensors")


@pytest.mark.parametrize("change", [_lost, _no_file, _of_another])
def test_a_folder_in_disorder(
    change: Callable[[Path], None], checkpoint: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_cache, "SHARD", 20_000)
    expected = logits(loaded(checkpoint, home))
    change(home / files(home)[0].parent)
    for _ in range(3):
        assert torch.equal(logits(loaded(checkpoint, home)), expected)


def test_a_folder_that_is_deleted_while_it_is_read(
    checkpoint: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By another server, for which it is out of date."""
    expected = logits(loaded(checkpoint, home))
    calls: list[str] = []
    get = weights_cache.CachedWeights.get

    def deleting(self: weights_cache.CachedWeights, name: str) -> Any:
        calls.append(name)
        if len(calls) == 3:
            shutil.rmtree(home)
        return get(self, name)

    monkeypatch.setattr(weights_cache.CachedWeights, "get", deleting)
    assert torch.equal(logits(loaded(checkpoint, home)), expected)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
