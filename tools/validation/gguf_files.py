"""Writes GGUF files of a validation: the embedded model, and any file with its weights as float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType
from safetensors.torch import load_file

from server.models.files.directory import EMBEDDED

PRE_TOKENIZER = "smollm"  # llama.cpp's name for how the embedded model's tokenizer splits texts
NORMAL, CONTROL = 1, 3  # GGUF's types of tokens
Array = npt.NDArray[Any]


def write_tiny(file: Path, kind: GGMLQuantizationType) -> None:
    """Write the embedded model, a Llama, with matrices of a type; BF16 is that of its weights."""
    directory = EMBEDDED["tiny"]
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    _add_tokenizer(writer, json.loads((directory / "tokenizer.json").read_text()), config)
    for name, tensor in _iter_tensors(directory, config):
        of = kind if tensor.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    control = {each["id"] for each in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if i in control else NORMAL for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)


def _iter_tensors(directory: Path, config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """Yield llama.cpp's name of each tensor and its numbers, with rows in llama.cpp's order."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        rotated = next((count for part, count in heads.items() if part in name), None)
        if rotated is not None:  # RoPE rotates the dimensions i and D / 2 + i of a head together; there 2i and 2i + 1
            tensor = tensor.unflatten(0, (rotated, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        yield stored, tensor.float().numpy()


def write_float32(source: Path, file: Path) -> None:
    """Write a GGUF file with the weights of another one as float32, so that llama.cpp rounds no activations."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, *of = field.types
            writer.add_key_value(field.name, field.contents(), kind, of[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * int(tensor.n_elements))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:  # one after the other: memory holds one of them
        writer.write_tensor_data(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False))
    writer.close()
