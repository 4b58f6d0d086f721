"""The decoder computes the same logits as transformers, for every architecture that it supports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    SiglipVisionConfig,
)

from kernels.reference.backend import ReferenceOps
from server.models.config import load_config
from server.models.decoder import Decoder
from server.models.errors import ModelError
from server.models.load import read_model_info
from server.models.no_cache import NoCacheAttention, debug_generate_full_context
from server.models.weights import Safetensors
from tests.models.random_models import CONFIGS, load_decoder, save_random_model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = save_random_model(name, tmp_path)
    ours = load_decoder(tmp_path)
    ids = torch.randint(2, 300, (70,))
    attention = NoCacheAttention(ours.layer_specs, len(ids), ours.device)
    attention.logit_index = attention.positions  # all rows
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
        torch.testing.assert_close(ours.forward(ids, attention), expected, rtol=0, atol=1e-4)


def test_the_decoder_of_a_model_that_sees_is_served_alone(tmp_path: Path) -> None:
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(text_config=CONFIGS["gemma3"].to_dict(), vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    theirs = Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path)
    ids = torch.randint(2, 200, (40,))
    with torch.inference_mode():
        logits = ours.forward(ids, NoCacheAttention(ours.layer_specs, len(ids), ours.device))
        torch.testing.assert_close(logits[0], theirs(input_ids=ids[None]).logits[0, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("positions", [4, 5])
def test_longrope_factors_are_those_of_the_longest_text_served(positions: int, tmp_path: Path) -> None:
    """transformers changes them as a text grows, which cached keys do not survive."""
    theirs = save_random_model("phi3_longrope", tmp_path)
    ours = load_decoder(tmp_path, positions=positions)
    ids = torch.randint(2, 300, (positions,))
    with torch.inference_mode():
        logits = ours.forward(ids, NoCacheAttention(ours.layer_specs, len(ids), ours.device))
        torch.testing.assert_close(logits[0], theirs(ids[None]).logits[0, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_greedy_text_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = save_random_model(name, tmp_path)
    prompt = torch.randint(2, 300, (9,))
    expected = theirs.generate(prompt[None], max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert debug_generate_full_context(load_decoder(tmp_path), prompt.tolist(), 30) == expected[0, 9:].tolist()


def test_sharded_weights_are_found(tmp_path: Path) -> None:
    theirs = save_random_model("llama", tmp_path, shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = torch.randint(2, 300, (20,))
    ours = load_decoder(tmp_path)
    with torch.inference_mode():
        logits = ours.forward(ids, NoCacheAttention(ours.layer_specs, len(ids), ours.device))
        torch.testing.assert_close(logits[0], theirs(ids[None]).logits[0, -1], rtol=0, atol=1e-4)


def test_weights_can_be_kept_narrower_than_activations(tmp_path: Path) -> None:
    theirs = save_random_model("qwen2", tmp_path)
    ids = torch.randint(2, 300, (20,))
    weights = Safetensors(tmp_path, torch.bfloat16, torch.device("cpu"))
    ours = Decoder(load_config(tmp_path), weights, ReferenceOps(), torch.float32)
    assert ours.weight_bytes == sum(p.numel() for p in theirs.parameters()) * 2
    with torch.inference_mode():
        logits = ours.forward(ids, NoCacheAttention(ours.layer_specs, len(ids), ours.device))[0]
        expected = theirs(ids[None]).logits[0, -1]
    assert torch.corrcoef(torch.stack((logits, expected)))[0, 1] > 0.99


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM; the decoder knows LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"vocab_size": None}, "vocab_size is None: should be a whole number"),
    ],
)
def test_what_the_decoder_does_not_know_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLM"]} | change))
    with pytest.raises(ModelError, match=message):
        load_config(tmp_path)


def test_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    save_random_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_decoder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("name", ["llama", "llama_yarn"])  # YaRN's tables are multiplied by a factor
def test_rotating_back_undoes_rotating(name: str, tmp_path: Path) -> None:
    save_random_model(name, tmp_path)
    rotate = load_decoder(tmp_path).layer_specs[0].rotate
    assert rotate is not None
    x, delta = torch.randn(5, 2, 16), torch.tensor([0, 1, 7, 100, 300])
    torch.testing.assert_close(rotate(rotate(x, delta), -delta), x)
    torch.testing.assert_close(rotate(rotate(x, delta + 3), -delta), rotate(x, torch.full_like(delta, 3)))


def _windows(directory: Path) -> tuple[int | None, ...]:
    return tuple(layer.window for layer in load_config(directory).layers)


def test_windows_of_files_that_have_no_layer_types(tmp_path: Path) -> None:
    CONFIGS["qwen2_windows"].save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text()) | {"architectures": ["Qwen2ForCausalLM"]}
    path.write_text(json.dumps(raw))
    with_types = _windows(tmp_path)
    del raw["layer_types"]
    path.write_text(json.dumps(raw))
    assert _windows(tmp_path) == with_types == (None, 16, 16)
    path.write_text(json.dumps(raw | {"use_sliding_window": False}))
    assert _windows(tmp_path) == (None, None, None)


KEYS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "layer_types",
    "no_rope_layers",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
)


@pytest.mark.parametrize(
    "name",
    ["llama", "mistral", "mixtral", "phi3", "qwen2_windows", "qwen3", "qwen3_moe", "smollm3", "gemma2", "gemma3"],
)
def test_what_config_json_leaves_out_is_what_transformers_takes_for_granted(name: str, tmp_path: Path) -> None:
    save_random_model(name, tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    ids = torch.randint(2, 300, (40,))
    for key in raw.keys() & KEYS:
        path.write_text(json.dumps({k: v for k, v in raw.items() if k != key}))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        ours = load_decoder(tmp_path, positions=40)
        with torch.inference_mode():
            logits = ours.forward(ids, NoCacheAttention(ours.layer_specs, len(ids), ours.device))
            expected = theirs(ids[None]).logits[0, -1]
        torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-4, msg=f"{key} left out")
        assert {spec.window for spec in ours.layer_specs} == _windows_of(theirs), key


def _windows_of(theirs: PreTrainedModel) -> set[int | None]:
    kinds = getattr(theirs.config, "layer_types", None) or ["sliding_attention"]
    window = getattr(theirs.config, "sliding_window", None)
    return {window if kind == "sliding_attention" else None for kind in kinds}


def test_a_large_gemma_3_needs_no_more_than_its_published_config(tmp_path: Path) -> None:
    """Its text_config holds what differs from the class's defaults."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text["model_type"] = "gemma3_text"
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "dtype": "bfloat16"}
    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"text_config": text | rope}))
    config = load_config(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert (config.vocab_size, config.num_q_heads, config.num_kv_heads) == (262_208, 8, 4)
    assert (config.head_dim, config.max_positions, config.dtype) == (256, theirs.max_position_embeddings, "bfloat16")
    assert [layer.window is not None for layer in config.layers] == [
        kind == "sliding_attention" for kind in theirs.layer_types
    ]
    assert {layer.rope.theta for layer in config.layers if layer.rope} == {1e6, 1e4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, r"the checkpoint is quantized \(fp8\)"),
        ({"use_bidirectional_attention": True}, "makes it an encoder"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0: should be above 0"),
        ({"head_dim": "16"}, "head_dim is '16': should be a whole number"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None: should be a number"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor is 0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor is 2"),
        ({"layer_types": [1, 2, 3]}, "layer_types.0 is 1"),
        ({"eos_token_id": "a"}, "eos_token_id is 'a'"),
        ({"text_config": [], "vocab_size": []}, "vocab_size is"),
    ],
)
def test_values_that_no_model_can_have_are_reported(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_random_model("llama", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        load_config(tmp_path)


def test_tensors_of_a_quantized_checkpoint_are_refused(tmp_path: Path) -> None:
    save_random_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="of quantized checkpoints, only MLX's and GGUF files can be read"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}])
def test_an_index_that_is_none_is_reported(index: Any, tmp_path: Path) -> None:
    save_random_model("llama", tmp_path, shard_size="100KB")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is no"):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    "change", [{"num_attention_heads": 2}, {"head_dim": 32}, {"vocab_size": 400}, {"intermediate_size": 48}]
)
def test_a_config_that_speaks_of_another_model_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    save_random_model("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=r"by config\.json it should be"):
        load_decoder(tmp_path)


def test_tensors_that_begin_anywhere_in_their_file_are_aligned(tmp_path: Path) -> None:
    """A byte before all others moves them."""
    there = save_random_model("qwen2", tmp_path).state_dict()
    file = tmp_path / "model.safetensors"
    size = int.from_bytes((whole := file.read_bytes())[:8], "little")
    header, numbers = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [offset + 1 for offset in entry["data_offsets"]]
    header["a_byte"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" + numbers)
    weights = Safetensors(tmp_path, torch.float32, torch.device("cpu"))
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight"):
        found = weights.get(name, there[name].shape)
        assert found.data_ptr() % found.element_size() == 0
        assert torch.equal(found, there[name])


@pytest.mark.parametrize(
    ("eos", "kept"), [([1, -1, 300, 2**32 - 1, True, 2.0, 299], {1, 299}), (-1, set()), (None, {1})]
)
def test_ends_that_are_no_tokens_are_ignored(
    eos: Any, kept: set[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_random_model("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert read_model_info(tmp_path, "auto").eos_ids == kept
    warned = [message for message in caplog.messages if "which are not in the vocabulary of 300 tokens" in message]
    assert len(warned) == (eos is not None)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_norm_or_a_bias_that_is_not_finite_is_refused(number: float, tmp_path: Path) -> None:
    save_random_model("qwen2", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.self_attn.k_proj.bias"):
        save_file(whole | {name: torch.full_like(whole[name], number)}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=rf"tensor '{name}' has numbers that are NaN or infinite in torch.float32"):
            load_decoder(tmp_path)


def test_of_a_tensor_in_two_files_the_one_that_the_index_names_counts(tmp_path: Path) -> None:
    there = save_random_model("llama", tmp_path).state_dict()
    (tmp_path / "model.safetensors").rename(tmp_path / "b.safetensors")
    name = "model.norm.weight"
    save_file({name: there[name] + 1}, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' is in a\.safetensors and in b\.safetensors: delete"):
        load_decoder(tmp_path)
    for file, expected in (("a.safetensors", there[name] + 1), ("b.safetensors", there[name])):
        weight_map = dict.fromkeys(there, "b.safetensors") | {name: file, "other": "a.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        weights = Safetensors(tmp_path, torch.float32, torch.device("cpu"))
        assert torch.equal(weights.get(name, (64,)), expected)


def test_more_experts_than_there_are_cannot_be_chosen(tmp_path: Path) -> None:
    save_random_model("mixtral", tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    for change, message in (
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6, and there are 5 experts"),
        ({"num_experts_per_tok": 0}, "lacks the number of experts"),
        ({"num_local_experts": 4}, r"by config\.json it should be \[4, 64\] \(the number of experts, hidden_size\)"),
    ):
        path.write_text(json.dumps(raw | change))
        with pytest.raises(ModelError, match=message):
            load_decoder(tmp_path)
