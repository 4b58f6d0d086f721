"""Writes a trained model as a Hugging Face directory, and reads such a directory back for measurements.

    python -m tools.train.export runs/tiny server/models/tiny

Any program that loads Llama checkpoints can load the result.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.train.corpus.packing import BOS_ID, EOS_ID
from tools.train.model import Llama, LlamaShape
from tools.train.tokenizer import BOS, EOS

# The format of chats in the corpus: "Q: ...", "A: ..." and the EOS token. A system message is plain text before them.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Q: ' + message['content'] | trim + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'A: ' + message['content'] | trim + eos_token }}"
    "{% elif message['role'] in ('system', 'developer', 'tool', 'function') %}"
    "{{ message['content'] | trim + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)


def make_config(shape: LlamaShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.ff,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_theta": shape.theta, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
    }


def parse_shape(config: dict[str, Any]) -> LlamaShape:
    return LlamaShape(
        vocabulary=config["vocab_size"],
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        ff=config["intermediate_size"],
        theta=config["rope_parameters"]["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        positions=config["max_position_embeddings"],
    )


def _make_tokenizer_config(shape: LlamaShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.positions,
        "chat_template": CHAT_TEMPLATE,
    }


def export_model(model: Llama, tokenizer: Path, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    # The embeddings are tied, so lm_head is not written.
    tensors = {f"model.{name}": t.detach().cpu().bfloat16().contiguous() for name, t in model.state_dict().items()}
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes files that only the owner can read
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": False}
    for name, content in (
        ("config.json", make_config(model.shape)),
        ("generation_config.json", generation),
        ("tokenizer_config.json", _make_tokenizer_config(model.shape)),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    shutil.copyfile(tokenizer, directory / "tokenizer.json")


def load_exported(directory: Path) -> tuple[Llama, Tokenizer]:
    """Return the model of an exported directory in float32, and its tokenizer."""
    model = Llama(parse_shape(json.loads((directory / "config.json").read_text())))
    tensors = load_file(directory / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()})
    return model.eval(), Tokenizer.from_file(str(directory / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Export a training run as a Hugging Face directory.")
    parser.add_argument("run", type=Path, help="the --out folder of tools.train.train")
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    state = torch.load(arguments.run / "checkpoint.pt", map_location="cpu", weights_only=True)
    model = Llama(LlamaShape(**state["shape"]))
    model.load_state_dict(state["model"])
    export_model(model, arguments.run / "tokenizer.json", arguments.directory)


if __name__ == "__main__":
    main()
