"""Writes transformers models as GGUF files, as llama.cpp's converter does, with the gguf package's names and writer."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from kernels.weights.block_formats import FORMATS
from tests.kernels.block_weights import draw_weight
from tests.models.random_models import CONFIGS, byte_tokenizer, random_model

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}  # by model_type; others have the same name
PERMUTED = ("llama", "smollm3")  # architectures whose rows of q and k the converter reorders
KEPT = (Type.F32, Type.F16, Type.BF16)


def gguf_model(name: str, *, seed: int = 0, **sizes: int) -> PreTrainedModel:
    """As random_models has it but for some `sizes`, without what llama.cpp's converter does not write."""
    config = copy.deepcopy(CONFIGS[name])
    for size, number in sizes.items():
        setattr(config, size, number)
    if hasattr(config, "query_pre_attn_scalar"):
        config.query_pre_attn_scalar = config.head_dim
    return random_model(config, seed=seed)


def round_weights(model: PreTrainedModel, kind: Type) -> None:
    """Makes the model what is left of it in a file of that type."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(p.numpy(), kind), kind)))


def write_gguf(
    model: PreTrainedModel,
    file: Path,
    kind: Type | Callable[[str], Type] = Type.F32,
    *,
    rng: random.Random | None = None,
    split_max_tensors: int = 0,
    **metadata: Any,
) -> Path:
    """`kind`: the type of matrices, or what it is by their names; those that the gguf package cannot write are random.

    `split_max_tensors`: most tensors of a part; 0: one file.
    `metadata`: further keys, a dot being written as two underscores; None leaves one out.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split_max_tensors)
    _add_shape(writer, config)
    _add_rope(writer, model, architecture)
    add_byte_level(writer, byte_tokenizer(config.vocab_size))
    for key, value in metadata.items():
        add(writer, key.replace("__", "."), value)
    choose = kind if callable(kind) else lambda _: kind
    _add_tensors(writer, model, architecture, choose, rng or random.Random(0))
    return write_to(writer, file)


def write_to(writer: gguf.GGUFWriter, file: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Sets a key, whatever it was."""
    writer.kv_data[0].pop(key, None)
    if value is not None:
        kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)


def add_byte_level(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str = "gpt-2") -> None:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    control = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    defined = set(tokenizer.get_added_tokens_decoder()) - control
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in control else 4 if i in defined else 1 for i in range(len(tokens))])
    if model["merges"]:
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type in ("phi3", "mistral", "gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "gemma3_text":
        add(writer, "gemma3.attention.sliding_window_pattern", config.layer_types.index("full_attention") + 1)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_rope(writer: gguf.GGUFWriter, model: PreTrainedModel, architecture: str) -> None:
    config = model.config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turning = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(turning)
    kind, longest = rope["rope_type"], config.max_position_embeddings
    if kind == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, turning, 2) / turning)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    elif kind == "longrope":
        trained = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(trained)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(longest / trained) / math.log(trained)))
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    elif kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_tensors(
    writer: gguf.GGUFWriter,
    model: PreTrainedModel,
    architecture: str,
    choose: Callable[[str], Type],
    rng: random.Random,
) -> None:
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        data = tensor.numpy()
        if architecture in PERMUTED and "q_proj" in name:
            data = _permuted(data, model.config.num_attention_heads)
        if architecture in PERMUTED and "k_proj" in name:
            data = _permuted(data, model.config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        of = choose(stored) if data.ndim > 1 else Type.F32
        writer.add_tensor(stored, np.ascontiguousarray(_quantize(data, of, rng)), raw_dtype=of)


def _quantize(data: np.ndarray[Any, Any], kind: Type, rng: random.Random) -> np.ndarray[Any, Any]:
    try:
        return gguf.quants.quantize(data, kind)
    except NotImplementedError:
        format = FORMATS[kind.name]
        return draw_weight(rng, format, len(data), data.shape[1] // format.columns, float(data.std())).blocks.numpy()


def _permuted(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Every head's rows 0, D/2, 1, D/2 + 1, ..."""
    head_dim = len(weights) // heads
    order = [half * head_dim // 2 + i for i in range(head_dim // 2) for half in (0, 1)]
    return np.concatenate([weights[h * head_dim : (h + 1) * head_dim][order] for h in range(heads)])
