"""Small random models as transformers itself writes them, and transformers' word on what they compute."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Cohere2Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    OlmoHybridConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
    StableLmConfig,
)

from kernels.reference.backend import ReferenceOps
from server.models.config import load_config
from server.models.decoder import Decoder
from server.models.weights import Safetensors

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

V = {"vocab_size": 300, "rope_parameters": ROPE}
UNTIED = V | {"tie_word_embeddings": False}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 6.0, 8.0, 9.0],
    "original_max_position_embeddings": 4,
}
GEMMA = V | {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 16}
SPARSE = UNTIED | {"num_experts_per_tok": 2}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**UNTIED, **SHAPE),
    "llama_tied_biased": LlamaConfig(**V, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, **SHAPE),
    "llama_wide_heads": LlamaConfig(**V, head_dim=32, **SHAPE),
    "llama3": LlamaConfig(**UNTIED | {"rope_parameters": LLAMA3}, **SHAPE),
    "llama_linear": LlamaConfig(**V | {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}, **SHAPE),
    "llama_dynamic": LlamaConfig(**V | {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}}, **SHAPE),
    "llama_yarn": LlamaConfig(**V | {"rope_parameters": YARN}, **SHAPE),
    "mistral": MistralConfig(**UNTIED, sliding_window=16, **SHAPE),
    "mistral_sees_all": MistralConfig(**UNTIED, sliding_window=None, **SHAPE),
    "mixtral": MixtralConfig(**SPARSE, num_local_experts=5, sliding_window=None, **SHAPE),
    "phi3": Phi3Config(**UNTIED, sliding_window=40, pad_token_id=0, **SHAPE),
    "phi3_longrope": Phi3Config(
        **UNTIED | {"rope_parameters": LONGROPE}, pad_token_id=0, original_max_position_embeddings=4, **SHAPE
    ),
    "qwen2": Qwen2Config(**UNTIED | {"rope_parameters": ROPE | {"rope_theta": 1e6}}, **SHAPE),
    "qwen2_tied": Qwen2Config(**V, tie_word_embeddings=True, **SHAPE),
    "qwen2_windows": Qwen2Config(**V, use_sliding_window=True, sliding_window=16, max_window_layers=1, **SHAPE),
    "qwen3": Qwen3Config(**UNTIED, head_dim=32, **SHAPE),
    "qwen3_moe": Qwen3MoeConfig(
        **SPARSE,
        head_dim=32,
        num_experts=6,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        **SHAPE,
    ),
    "qwen3_moe_raw_shares": Qwen3MoeConfig(
        **SPARSE, head_dim=16, num_experts=4, moe_intermediate_size=32, norm_topk_prob=False, **SHAPE
    ),
    "smollm3": SmolLM3Config(**V, tie_word_embeddings=True, no_rope_layers=[1, 1, 0], pad_token_id=0, **SHAPE),
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0, **SHAPE),
    "gemma3": Gemma3TextConfig(
        **GEMMA
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        **SHAPE,
    ),
}


PLAIN = SHAPE | {"vocab_size": 300}
FALLBACK: dict[str, PretrainedConfig] = {  # what only transformers computes
    "cohere2": Cohere2Config(**PLAIN, sliding_window=16, pad_token_id=0),
    "gpt2": GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=4, n_positions=512, bos_token_id=0, eos_token_id=1),
    "gpt_neox": GPTNeoXConfig(**{k: v for k, v in PLAIN.items() if k != "num_key_value_heads"}),
    "gpt_oss": GptOssConfig(
        **PLAIN,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        pad_token_id=0,
        rope_parameters=ROPE,
    ),
    "granite": GraniteConfig(**PLAIN, logits_scaling=0.5, attention_multiplier=0.3, residual_multiplier=0.5),
    "olmo2": Olmo2Config(**PLAIN, pad_token_id=0),
    "stablelm": StableLmConfig(**PLAIN),
}


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "pad_token_id": 0}
HYBRIDS: dict[str, PretrainedConfig] = {  # with recurrent states, by transformers
    "falcon_h1": FalconH1Config(**PLAIN, **MAMBA | {"mamba_d_head": 16}, mamba_d_ssm=64, head_dim=16),
    "granite_hybrid": GraniteMoeHybridConfig(
        **PLAIN,
        **MAMBA,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        position_embedding_type=None,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "kimi_linear": KimiLinearConfig(
        **PLAIN | {"num_key_value_heads": 4},
        **EXPERTS,
        num_local_experts=4,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        linear_head_dim=16,
        linear_num_heads=4,
        pad_token_id=0,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "lfm2": Lfm2Config(**PLAIN, pad_token_id=0, layer_types=["conv", "full_attention", "conv"]),
    "nemotron_h": NemotronHConfig(
        **{key: value for key, value in PLAIN.items() if key != "num_hidden_layers"},
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=32,
        **EXPERTS,
        pad_token_id=0,
    ),
    "olmo_hybrid": OlmoHybridConfig(**PLAIN, **DELTA | {"linear_num_key_heads": 4}, pad_token_id=0),
    "qwen3_5": Qwen3_5TextConfig(**PLAIN, **DELTA),
    "qwen3_next": Qwen3NextConfig(**PLAIN, **DELTA, **EXPERTS, num_experts=4, shared_expert_intermediate_size=32),
    "bamba": BambaConfig(**PLAIN, **MAMBA, attn_layer_indices=[1]),
    "jamba": JambaConfig(**PLAIN, num_experts=4, attn_layer_period=2, attn_layer_offset=1, pad_token_id=0),
}


# Standard deviations of weights, by name: scores are large, so that a wrong key shows.
SPREAD = {"q_proj": 0.4} | dict.fromkeys(("qkv_proj", "c_attn", "query_key_value"), 0.2)


def random_model(config: PretrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Random weights."""
    torch.manual_seed(seed)
    own = copy.deepcopy(config)  # saving a model writes into its config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(own, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, next((spread for part, spread in SPREAD.items() if part in name), 0.1))
            else:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def save_random_model(name: str, directory: Path, *, seed: int = 0, shard_size: str = "5GB") -> PreTrainedModel:
    """Saves a random model as a directory, with a tokenizer."""
    config = (CONFIGS | FALLBACK | HYBRIDS)[name]
    model = random_model(config, seed=seed)
    model.save_pretrained(directory, max_shard_size=shard_size)
    byte_tokenizer(config.vocab_size).save(str(directory / "tokenizer.json"))
    return model


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """<s>, </s>, the bytes, and made-up words up to `vocab_size`: every id has a text."""
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"\u0120w{i}" for i in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def load_decoder(directory: Path, dtype: torch.dtype = torch.float32, *, positions: int | None = None) -> Decoder:
    """Our decoder on that directory."""
    weights = Safetensors(directory, dtype, torch.device("cpu"))
    return Decoder(load_config(directory), weights, ReferenceOps(), dtype, positions=positions)
