"""Models with quantized weights: checkpoints of MLX, and matrices that are quantized while they are read.

Compared with transformers on the same weights rounded by numpy: plain torch within 1e-4. The C++ kernels round
activations, too; they are compared with a model that does so by formula.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kernels.backends import REFERENCE
from kernels.ops import Ops
from kernels.reference.backend import ReferenceOps
from kernels.weights.block_formats import FORMATS, BlockTensor
from kernels.weights.quantization import dequantize
from kernels.weights.quantizers import quantize_blocks
from kernels.weights.stored import dequantize_weight, get_format
from server.engine.device import WEIGHT_FORMATS
from server.engine.info import make_engine_info
from server.models.base import Model
from server.models.errors import ModelError
from server.models.formats import quantized
from server.models.formats.mlx_weights import MLXWeights
from server.models.load import load_model, read_model_info
from server.models.no_cache import NoCacheAttention
from server.models.weights import Safetensors, WeightsConfig
from tests.engine.engine_driver import Driver
from tests.kernels.backend_matrix import BACKENDS, SLOW
from tests.kernels.quantized_weights import quantize_as_mlx
from tests.models.gguf_files import write_gguf
from tests.models.mlx_files import Formats, write_mlx
from tests.models.random_models import CONFIGS, random_model, save_random_model
from tests.models.rounded_weights import (
    SHORT_TEXTS,
    RoundedInputs,
    relative_difference,
    round_weights,
)

AS_STORED = WeightsConfig(torch.float32, as_stored=True)
INT4 = WeightsConfig(torch.float32, WEIGHT_FORMATS["int4"], as_stored=True)
INT8 = WeightsConfig(torch.float32, WEIGHT_FORMATS["int8"], as_stored=True)
CPU = torch.device("cpu")
MIXED: Formats = {
    "model.layers.0.self_attn.v_proj": (8, 32),
    "model.layers.1.mlp.up_proj": None,
    "model.embed_tokens": (8, 32),
}


def loaded(directory: Path, weights: WeightsConfig, *, impl: Any = "auto", ops: Ops | None = None) -> Model:
    return load_model(
        directory,
        impl,
        ops=ops or ReferenceOps(),
        dtype=torch.float32,
        weights=weights,
        device=CPU,
        positions=512,
    )


@torch.inference_mode()
def logits(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """ids [n] -> [n, V]."""
    attention = NoCacheAttention(model.layer_specs, len(ids), CPU)
    attention.logit_index = attention.positions
    return model.forward(ids, attention)


def assert_same_logits(ours: Model, theirs: PreTrainedModel) -> None:
    ids = torch.randint(2, 300, (70,))
    with torch.inference_mode():
        torch.testing.assert_close(logits(ours, ids), theirs(ids[None]).logits[0], rtol=0, atol=1e-4)


def wide_llama() -> PreTrainedModel:
    """Whose rows all have groups of 64."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.intermediate_size = 128
    return random_model(config)


def changed(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


# -------------------------------------------------------------------- checkpoints of MLX
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2_tied", "qwen3", "phi3", "gemma2", "gemma3"])
@pytest.mark.parametrize("bits", [4, 8])
def test_logits_of_a_checkpoint_of_mlx(name: str, bits: int, tmp_path: Path) -> None:
    theirs = write_mlx(random_model(CONFIGS[name]), tmp_path, bits, 32)
    ours = loaded(tmp_path, AS_STORED)
    assert next(iter(ours.weight_formats)) == f"int{bits}"
    assert_same_logits(ours, theirs)
    assert_same_logits(loaded(tmp_path, WeightsConfig(torch.float32)), theirs)


def test_formats_may_differ_from_module_to_module(tmp_path: Path) -> None:
    theirs = write_mlx(wide_llama(), tmp_path, 4, 64, MIXED, mode="affine")
    assert_same_logits(loaded(tmp_path, AS_STORED), theirs)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in SLOW | {REFERENCE}])
@pytest.mark.parametrize("kept", [AS_STORED, INT4, INT8], ids=["as stored", "int4", "int8"])
def test_every_backend_computes_the_same_model(backend: str, kept: WeightsConfig, tmp_path: Path) -> None:
    """But that some round activations."""
    write_mlx(wide_llama(), tmp_path, 4, 64, MIXED if kept is AS_STORED else None)
    computed = (loaded(tmp_path, kept, ops=ops) for ops in (BACKENDS[backend](), ReferenceOps(), RoundedInputs()))
    got, *ways = (torch.cat([logits(model, ids) for ids in SHORT_TEXTS]) for model in computed)
    assert min(relative_difference(got, expected) for expected in ways) < 1e-5
    assert relative_difference(*ways) > 5e-3


def test_memory_is_that_of_the_file(tmp_path: Path) -> None:
    write_mlx(wide_llama(), tmp_path, 4, 64)
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert loaded(tmp_path, AS_STORED).weight_bytes == stored
    numbers = sum(p.numel() for p in wide_llama().parameters())
    wide = loaded(tmp_path, WeightsConfig(torch.bfloat16))
    assert (wide.weight_bytes, next(iter(wide.weight_formats))) == (2 * numbers, "bfloat16")


def test_greedy_text_of_a_checkpoint_of_mlx(tmp_path: Path) -> None:
    theirs = write_mlx(wide_llama(), tmp_path / "mlx", 4, 64)
    theirs.save_pretrained(tmp_path / "dequantized")
    prompt = [5, 250, 17, 96, 33]
    heard = {}
    for name in ("mlx", "dequantized"):
        driver = Driver(tmp_path / name, dtype="float32", kernels="reference")
        heard[name] = driver.submit("a", prompt, max_tokens=30)
        driver.run()
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert heard["mlx"].tokens == heard["dequantized"].tokens == expected[0, len(prompt) :].tolist()


def test_a_part_of_a_larger_model_is_found_by_its_own_names(tmp_path: Path) -> None:
    theirs = write_mlx(wide_llama(), tmp_path, 4, 64, {"language_model.lm_head": (8, 32)})
    head = quantize_as_mlx(theirs.lm_head.weight.detach(), 8, 32)

    def moved(tensors: dict[str, torch.Tensor]) -> None:
        for name in [*tensors]:
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["language_model.lm_head.weight"] = head.numbers.view(torch.uint32)
        tensors |= {"language_model.lm_head.scales": head.scale, "language_model.lm_head.biases": head.offset}

    changed(tmp_path, moved)
    with torch.no_grad():
        theirs.lm_head.weight.copy_(dequantize(head))
    assert_same_logits(loaded(tmp_path, AS_STORED), theirs)


def _without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_a_missing_part_is_reported(part: str, tmp_path: Path) -> None:
    write_mlx(wide_llama(), tmp_path, 4, 64)
    changed(tmp_path, _without(f"model.layers.1.mlp.up_proj.{part}"))
    with pytest.raises(ModelError, match=rf"no tensor 'model\.layers\.1\.mlp\.up_proj\.{part}'; is the checkpoint com"):
        loaded(tmp_path, AS_STORED)


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_a_part_that_is_no_matrix_is_reported(part: str, tmp_path: Path) -> None:
    write_mlx(wide_llama(), tmp_path, 4, 64)
    name = f"model.layers.1.mlp.up_proj.{part}"
    changed(tmp_path, lambda tensors: tensors.update({name: tensors[name][0, 0].clone()}))
    with pytest.raises(ModelError, match=r"up_proj: weight, scales and biases must be matrices"):
        loaded(tmp_path, AS_STORED)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"bits": 6}, "weights of 6 bits are not supported; 4 and 8 bits are; convert the model with `mlx_lm.convert"),
        ({"bits": 8}, "lm_head is not in 8 bits and groups of 64, as quantization says: weight"),
        ({"group_size": 32}, "is not in 4 bits and groups of 32, as quantization says"),
        ({"mode": "mxfp4"}, r"quantization\.mode of .*: should be 'affine'.*`mlx_lm.convert -q --q-mode affine`"),
        ({"bits": None}, r"quantization\.bits of .*: should be a whole number"),
        (7, r"config\.json: quantization of .*: should be a table"),
    ],
)
def test_a_config_that_speaks_of_other_numbers_is_reported(quantization: Any, message: str, tmp_path: Path) -> None:
    write_mlx(wide_llama(), tmp_path, 4, 64, {"model.embed_tokens": None})
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw["quantization"] = raw["quantization"] | quantization if isinstance(quantization, dict) else quantization
    file.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=message):
        loaded(tmp_path, AS_STORED)


def test_who_cannot_compute_a_checkpoint_of_mlx(tmp_path: Path) -> None:
    write_mlx(wide_llama(), tmp_path, 4, 64)
    with pytest.raises(ModelError, match="an MLX checkpoint is computed by the lean decoder only: leave"):
        read_model_info(tmp_path, "transformers")
    save_random_model("mixtral", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization": {"bits": 4, "group_size": 64}}))
    with pytest.raises(ModelError, match="MLX checkpoints of mixtures of experts cannot be read: use the"):
        loaded(tmp_path, AS_STORED)


# -------------------------------------------------------------------- quantized while they are read
@pytest.mark.parametrize("name", ["llama", "qwen2_tied", "phi3", "gemma3", "mixtral"])
@pytest.mark.parametrize("kept", [INT4, INT8], ids=["int4", "int8"])
def test_logits_of_a_model_quantized_while_it_is_read(name: str, kept: WeightsConfig, tmp_path: Path) -> None:
    theirs = save_random_model(name, tmp_path)
    assert kept.format is not None
    ours = loaded(tmp_path, kept)
    assert next(iter(ours.weight_formats)) == {"int4": "Q5_0", "int8": "Q8_0"}[kept.format.name], (
        "rows of fewer than 256 columns"
    )
    assert_same_logits(ours, round_weights(theirs, kept.format))


def test_rows_of_whole_blocks_get_4_bits_and_the_sensitive_ones_more(tmp_path: Path) -> None:
    config = copy.deepcopy(CONFIGS["llama"])
    config.hidden_size = config.intermediate_size = 256
    theirs = random_model(config)
    theirs.save_pretrained(tmp_path)
    ours = loaded(tmp_path, INT4)
    assert next(iter(ours.weight_formats)) == "Q4_K"
    assert INT4.format is not None
    assert_same_logits(ours, round_weights(theirs, INT4.format))
    stored = Safetensors(tmp_path, torch.float32, CPU)
    with quantized.open_quantized_weights(stored, tmp_path, INT4, CPU, layers=3) as weights:
        found = {
            name: get_format(weights.matrix(name, tuple(p.shape)))
            for name, p in theirs.named_parameters()
            if p.dim() == 2
        }
    sensitive = {name for name, format in found.items() if format == "Q6_K"}
    assert sensitive == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.2.self_attn.v_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
    }
    usual = {name: found[name] for name in found.keys() - sensitive}
    assert {format for name, format in usual.items() if "o_proj" not in name} == {"Q4_K"}
    assert {format for name, format in usual.items() if "o_proj" in name} == {"Q5_0"}, "rows of 64 columns"


def test_rows_of_no_whole_blocks_are_not_quantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = copy.deepcopy(CONFIGS["llama"])
    config.intermediate_size = 87
    theirs = random_model(config)
    theirs.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        ours = loaded(tmp_path, INT4)
    assert INT4.format is not None
    assert_same_logits(ours, round_weights(theirs, INT4.format))
    assert caplog.messages == ["matrices of 87 columns are not quantized: they are not whole blocks of 32"]


def test_memory_of_a_quantized_model(tmp_path: Path) -> None:
    theirs = save_random_model("qwen2_tied", tmp_path).bfloat16()
    theirs.save_pretrained(tmp_path)
    numbers = sum(p.numel() for p in theirs.parameters() if p.dim() == 2)
    others = sum(p.numel() for p in theirs.parameters() if p.dim() == 1)
    assert loaded(tmp_path, INT8).weight_bytes == numbers * 34 // 32 + 4 * others


def test_a_gguf_file_is_quantized_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    theirs = wide_llama()
    driver = Driver(write_gguf(theirs, tmp_path / "a.gguf"), weights="int4", dtype="float32", kernels="reference")
    assert next(iter(driver.core.model.weight_formats)) == "Q5_0"
    assert INT4.format is not None
    assert_same_logits(driver.core.model, round_weights(theirs, INT4.format))


def test_numbers_of_fewer_bits_stay_what_they_are(tmp_path: Path) -> None:
    theirs = write_mlx(wide_llama(), tmp_path, 4, 64)
    for kept in (INT4, INT8):
        assert_same_logits(loaded(tmp_path, kept), theirs)


def test_numbers_of_more_bits_are_rounded_once_more(tmp_path: Path) -> None:
    theirs = write_mlx(wide_llama(), tmp_path, 8, 64)
    stored = MLXWeights(tmp_path, torch.float32, CPU, as_stored=True)
    with quantized.open_quantized_weights(stored, tmp_path, INT4, CPU, layers=3) as weights:
        found = weights.matrix("model.layers.0.mlp.up_proj.weight", (128, 64))
    assert isinstance(found, BlockTensor)
    assert found.format == FORMATS["Q5_0"]
    expected = theirs.model.layers[0].mlp.up_proj.weight.detach()
    assert (dequantize_weight(found) - expected).abs().max() < expected.abs().max() / 16


def test_what_cannot_be_quantized_is_reported(tmp_path: Path) -> None:
    save_random_model("llama", tmp_path)
    with pytest.raises(ModelError, match=r"only the lean decoder can quantize weights: give --weights auto"):
        loaded(tmp_path, INT8, impl="transformers")
    changed(tmp_path, lambda tensors: tensors["model.layers.0.self_attn.k_proj.weight"].fill_(torch.nan))
    with pytest.raises(
        ModelError, match=r"k_proj\.weight': the weight has numbers that are NaN, infinite or beyond .*; give"
    ):
        loaded(tmp_path, INT4)


def test_a_long_quantization_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_random_model("llama", tmp_path)
    monkeypatch.setattr(quantized, "LOG_INTERVAL", -1.0)
    with caplog.at_level(logging.INFO):
        loaded(tmp_path, INT4)
    assert caplog.messages[-1] == "quantizing the weights to int4: layer 3 of 3"


def test_a_terminal_shows_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    save_random_model("llama", tmp_path)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    loaded(tmp_path, INT4)
    assert "quantizing the weights to int4" in terminal.getvalue()


def test_one_tensor_at_a_time_is_wider_than_it_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that was read is freed before the next one is read."""
    save_random_model("llama", tmp_path)
    alive: list[Any] = []

    def watched(weight: torch.Tensor, format: str) -> Any:
        assert all(reference() is None for reference in alive)
        alive.append(weakref.ref(weight))
        return quantize_blocks(weight, format)

    monkeypatch.setattr(quantized, "quantize_blocks", watched)
    loaded(tmp_path, INT4)
    assert len(alive) == 3 * 7 + 2, "seven matrices a layer, the embedding, and lm_head"


def test_the_engine_says_what_weights_are_kept_in(tmp_path: Path) -> None:
    write_mlx(wide_llama(), tmp_path, 4, 64)
    for weights, expected in (("auto", "int4"), ("int8", "int4"), ("bf16", "bfloat16")):
        assert (
            make_engine_info(Driver(tmp_path, weights=weights, dtype="float32").engine).settings["weights"] == expected
        )
