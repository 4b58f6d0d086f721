"""A model whose answers are known: it calls a tool, and says what came of it. Everything but its weights is real.

Its next token depends on the last one only. The embedding of each token is a vector of its own, attention and the MLP
add nothing, and the output layer has one large weight for each token: that of its successor. So a text whose tokens all
differ can be said from its first token on. The chat template ends the prompt with a token that begins such a text:

    tools           a little reasoning, and a call of get_weather
    a tool's answer what the weather is
    neither         a greeting

Prompts that end with the beginning of a call, as tool_choice demands, end with a quote or a space, which go on, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

REASONING, ANSWER, GREETING = "I should look.", "It is sunny in Orl\u00e9ans.", "Hello there!"
ARGUMENTS = {"city": "Orl\u00e9ans", "days": 3}
VOCABULARY = 512  # tokens, and the size of a vector
BEGIN, END, CALL, SAY, GREET = SPECIAL = ["<s>", "<|im_end|>", "<|call|>", "<|say|>", "<|greet|>"]
TEMPLATE = """{{- bos_token }}
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
{%- endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content or '' }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{%- endif %}
{%- for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}assistant:
{%- if messages[-1].role == 'tool' %}<|say|>{% elif tools %}<|call|>{% else %}<|greet|>{% endif %}
{%- endif %}"""


def write_tool_model(directory: Path) -> Path:
    """Write the model's files into a directory, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    pieces, successors = _make_chains()
    _write_tokenizer(directory, pieces)
    _write_weights(directory, successors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": VOCABULARY,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL.index(BEGIN),
        "eos_token_id": SPECIAL.index(END),
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _make_chains() -> tuple[list[str], dict[int, int]]:
    """Return the tokens by id, as the vocabulary writes them, and the successor of each token that has one."""
    alphabet = _byte_alphabet()
    pieces = [*SPECIAL, *alphabet]
    successors: dict[int, int] = {}

    def add_chain(start: int, text: str, end: int) -> int:
        """Let `text`, in new tokens of three bytes or more, follow a token; return the id of its first token."""
        data = text.encode()
        last, first, position = start, None, 0
        while position < len(data):
            size = 3 if len(data) - position > 8 else 8  # no rest that is too short to be a token of its own
            while (piece := "".join(alphabet[byte] for byte in data[position : position + size])) in pieces:
                size += 1
                assert position + size <= len(data), "the end of the text is a token already"
            pieces.append(piece)
            successors[last] = last = len(pieces) - 1
            first = last if first is None else first
            position += size
        successors[last] = end
        assert first is not None
        return first

    end = SPECIAL.index(END)
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    space, quote = (len(SPECIAL) + ord(character) for character in ' "')
    first_of_arguments = add_chain(space, arguments + "}\n</tool_call>", end)
    first_of_name = add_chain(quote, 'get_weather", "arguments": ', first_of_arguments)
    call = f'<think>\n{REASONING}\n</think>\n\n<tool_call>\n{{"name": "'
    add_chain(SPECIAL.index(CALL), call, first_of_name)
    add_chain(SPECIAL.index(SAY), ANSWER, end)
    add_chain(SPECIAL.index(GREET), GREETING, end)
    return pieces, successors


def _byte_alphabet() -> list[str]:
    """Return the characters that stand for the bytes from 0 to 255 in GPT-2's vocabularies."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


def _write_tokenizer(directory: Path, pieces: Sequence[str]) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))


def _write_weights(directory: Path, successors: dict[int, int]) -> None:
    output = torch.zeros(VOCABULARY, VOCABULARY)
    for token, successor in successors.items():
        output[successor, token] = 10.0
    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": torch.eye(VOCABULARY),
        "model.norm.weight": torch.ones(VOCABULARY),
        "lm_head.weight": output,
        f"{layer}input_layernorm.weight": torch.ones(VOCABULARY),
        f"{layer}post_attention_layernorm.weight": torch.ones(VOCABULARY),
        f"{layer}mlp.gate_proj.weight": torch.zeros(64, VOCABULARY),
        f"{layer}mlp.up_proj.weight": torch.zeros(64, VOCABULARY),
        f"{layer}mlp.down_proj.weight": torch.zeros(VOCABULARY, 64),
    }
    weights |= {f"{layer}self_attn.{name}_proj.weight": torch.zeros(VOCABULARY, VOCABULARY) for name in "qkvo"}
    save_file(weights, directory / "model.safetensors")
