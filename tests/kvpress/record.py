"""Runs presses of kvpress on a small random Llama and records what they see, their scores and what they keep.

Runs in kvpress's own environment. Arguments: the file to write, and a seed.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import kvpress
import torch
from kvpress import (
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    LagKVPress,
    ObservedAttentionPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress.utils import get_prerope_query_states
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils.logging import disable_progress_bar

from cache_strategies.scorers.kvpress import READS, compute_seed

LENGTH = 600
RATIOS = (0.5, 0.8)  # shares of the keys that are dropped
PRESS_RATIOS = (0.5, 0.75)  # with which 600 keys are whole numbers: some presses read the ratio
THETA = 10000.0
PRESSES: dict[str, tuple[type, dict[str, Any]]] = {
    "keydiff": (KeyDiffPress, {}),
    "knorm": (KnormPress, {}),
    "lagkv": (LagKVPress, {}),
    "snapkv": (SnapKVPress, {}),
    "tova": (TOVAPress, {}),
    "h2o": (ObservedAttentionPress, {}),
    "expected_attention": (ExpectedAttentionPress, {}),
    "expected_attention, mean only": (ExpectedAttentionPress, {"use_covariance": False, "epsilon": 0.02}),
    "streaming_llm": (StreamingLLMPress, {}),
}
# of presses as scorers: those that kvmux runs, and options of theirs
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in READS),
    ("CURPress", {"leverage_type": "kv_avg", "use_random_leverage": True, "local_window_size": 7}),
    ("CompactorPress", {"sink_size_start": 3, "blending": 0.35, "chunk_size": 100}),
    ("ExpectedAttentionPress", {"use_covariance": False, "epsilon": 0.02, "n_future_positions": 50}),
    ("LagKVPress", {"lag_size": 50, "cross_scoring": True}),
    ("RandomPress", {"seed": 3}),
    ("SnapKVPress", {"window_size": 16, "kernel_size": 9}),
    ("StreamingLLMPress", {"n_sink": 9}),
]


def make_model() -> LlamaForCausalLM:
    """Save a random model to a folder and load it, as kvpress's users do."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.12,  # large enough that heads attend to some keys more than to others
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model.eval()


def record_press(model: LlamaForCausalLM, tokens: torch.Tensor, press: Any) -> dict[str, torch.Tensor]:
    """Return what a press saw and kept, by layer: keys, values, queries, scores, kept positions."""
    rows: list[dict[str, torch.Tensor]] = []
    score, compress = press.score, press.compress

    def score_and_record(*arguments: Any) -> torch.Tensor:
        torch.manual_seed(compute_seed(LENGTH, arguments[0].layer_idx))
        rows[-1]["scores"] = score(*arguments)[0]
        return rows[-1]["scores"][None]

    def compress_and_record(module: Any, hidden: Any, keys: Any, values: Any, weights: Any, kwargs: Any) -> Any:
        queries, _ = apply_rotary_pos_emb(
            get_prerope_query_states(module, hidden), keys, *kwargs["position_embeddings"]
        )
        rows.append({"keys": keys[0], "values": values[0], "queries": queries[0]})
        kept, kept_values = compress(module, hidden, keys, values, weights, kwargs)
        # the positions are those of the keys that are equal
        distance = torch.cdist(kept[0].double(), keys[0].double(), compute_mode="donot_use_mm_for_euclid_dist")
        assert (distance.min(dim=-1).values == 0).all()
        rows[-1]["kept"] = distance.argmin(dim=-1).sort(dim=-1).values
        return kept, kept_values

    press.score, press.compress = score_and_record, compress_and_record
    with torch.inference_mode(), press(model):
        model(tokens, cache=DynamicCache())
    return {name: torch.stack([row[name] for row in rows]).clone() for name in rows[0]}


def main(file: str, seed: int) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    disable_progress_bar()
    model = make_model()
    tokens = torch.randint(512, (1, LENGTH))
    records = {
        f"{name} {ratio}": record_press(model, tokens, press(compression_ratio=ratio, **options))
        for name, (press, options) in PRESSES.items()
        for ratio in RATIOS
    }
    presses = [
        (name, options, record_press(model, tokens, getattr(kvpress, name)(compression_ratio=ratio, **options)))
        for name, options in OPTIONS
        for ratio in PRESS_RATIOS
    ]
    torch.save({"theta": THETA, "records": records, "presses": presses}, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
