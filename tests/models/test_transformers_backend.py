"""transformers' models with our attention in them: the same logits, what is found out about layers, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    FalconConfig,
    Llama4Config,
    Llama4TextConfig,
    MambaConfig,
    MiniMaxConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2VLConfig,
    Zamba2Config,
)

from kernels.reference.backend import ReferenceOps
from server.models.errors import ModelError
from server.models.load import load_model, read_model_info
from server.models.no_cache import NoCacheAttention, attend_causally
from server.models.transformers_backend import probe
from server.models.transformers_backend.model import TransformersModel
from server.models.weights import WeightsConfig
from tests.models.random_models import CONFIGS, FALLBACK, HYBRIDS, SHAPE, save_random_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [*FALLBACK, *HYBRIDS, *CONFIGS])
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = save_random_model(name, tmp_path)
    ours = TransformersModel(tmp_path, torch.float32, CPU)
    ids = torch.randint(2, 300, (60,))
    attention = NoCacheAttention(ours.layer_specs, len(ids), CPU)
    attention.logit_index = attention.positions[::7]
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0, ::7]
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(ours.forward(ids, attention), expected, rtol=0, atol=1e-4)
        embedded = ours.forward_embedded(ours.embed(ids), attention)
        torch.testing.assert_close(embedded, expected, rtol=0, atol=1e-4)
    assert ours.weight_bytes == 4 * sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("positions", [3, 5, 60])
def test_longrope_factors_are_those_of_the_longest_text_served(positions: int, tmp_path: Path) -> None:
    """They do not change with the texts of a step, as in the lean decoder."""
    save_random_model("phi3_longrope", tmp_path)
    kind = {"ops": ReferenceOps(), "dtype": torch.float32, "weights": WeightsConfig(torch.float32), "device": CPU}
    models = [load_model(tmp_path, impl, positions=positions, **kind) for impl in ("transformers", "lean")]
    for length in (3, positions, 2):
        ids = torch.randint(2, 300, (length,))
        with torch.inference_mode():
            theirs, ours = (m.forward(ids, NoCacheAttention(m.layer_specs, length, CPU)) for m in models)
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)


def test_layers_tell_what_they_are_like(tmp_path: Path) -> None:
    save_random_model("gpt_oss", tmp_path)
    first, second, _ = TransformersModel(tmp_path, torch.float32, CPU).layer_specs
    assert (first.window, second.window) == (16, None)
    assert (first.num_q_heads, first.num_kv_heads, first.head_dim, first.v_head_dim) == (4, 2, 16, 16)
    assert first.scale == 16**-0.5
    assert first.sink_logits is not None
    assert first.sink_logits.shape == (4,)


def test_facts_are_known_without_the_weights(tmp_path: Path) -> None:
    save_random_model("olmo2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert read_model_info(tmp_path, "auto") == (300, 512, frozenset({1}), "float32")


REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "state spaces": (
        MambaConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2),
        "a MambaConfig has no max_position_embeddings; models with state spaces, linear attention or ALiBi cannot be",
    ),
    "alibi": (
        BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=4),
        "BloomConfig has no max_position_embeddings",
    ),
    "states in a cache of its own": (
        MiniMaxConfig(
            **SHAPE,
            vocab_size=300,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        "MiniMax uses cache of its own",
    ),
    "attention that layers share": (
        Zamba2Config(
            **SHAPE, vocab_size=300, mamba_d_state=8, n_mamba_heads=4, layers_block_type=["mamba", "hybrid", "mamba"]
        ),
        "Zamba2Attention has no layer_idx of its own",
    ),
    "attention in chunks": (
        Llama4TextConfig(
            **SHAPE, vocab_size=300, head_dim=16, intermediate_size_mlp=96, num_local_experts=2, pad_token_id=0
        ),
        "layer 0 is of kind 'chunked_attention'; only sliding_attention and full_attention can be served",
    ),
    "positions of its own counting": (
        BartConfig(
            vocab_size=300,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=96,
        ),
        "its logits with kvmux's attention and with its own differ",
    ),
    "a window that no layer tells of": (
        PhimoeConfig(**SHAPE, vocab_size=300, num_local_experts=4, num_experts_per_tok=2, sliding_window=40),
        "sliding_window 40, but no layer_types to tell which layers have it: give --max-seq-len 40",
    ),
    "rotations that long texts change": (
        PhimoeConfig(
            **SHAPE,
            vocab_size=300,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=None,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "short_mscale": 1.0,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 64,
            },
        ),
        "texts longer than 64 tokens would change the RoPE of other texts: give --max-seq-len 64",
    ),
    "older code": (
        FalconConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        "transformers cannot load it with kvmux's attention",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_served_is_refused(kind: str, tmp_path: Path) -> None:
    config, message = REFUSED[kind]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        TransformersModel(tmp_path, torch.float32, CPU)


def test_a_model_that_attends_otherwise_than_it_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_model("olmo2", tmp_path)
    monkeypatch.setattr(probe, "attend_causally", lambda *args: attend_causally(*args) * 1.5)
    with pytest.raises(ModelError, match="its logits with kvmux's attention and with its own differ"):
        TransformersModel(tmp_path, torch.float32, CPU)


def test_what_cannot_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(ModelError, match="transformers cannot read its config"):
        read_model_info(tmp_path, "auto")
    config = {"model_type": "foo", "auto_map": {"AutoConfig": "foo.FooConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="transformers cannot read its config"):  # and asks nobody to run foreign code
        read_model_info(tmp_path, "auto")
    Qwen2VLConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"transformers has no decoder-only model of this architecture$"):
        TransformersModel(tmp_path, torch.float32, CPU)


def test_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    """transformers would fill in random numbers."""
    save_random_model("olmo2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"is incomplete.* model\.layers\.1\.mlp\.up_proj\.weight"):
        TransformersModel(tmp_path, torch.float32, CPU)


def test_the_dtype_of_a_model_that_sees_is_found(tmp_path: Path) -> None:
    config = Llama4Config(text_config={"num_hidden_layers": 1, "hidden_size": 64}, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    assert read_model_info(tmp_path, "transformers").dtype == "bfloat16"
