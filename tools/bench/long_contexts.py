"""Reads the settings of the server for long contexts; computes how many keys its strategies read in a decode step."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.kv_formats import INT4, INT8, KVFormat
from tools.bench.models import ModelShape

SETTINGS_FILE = Path(__file__).with_name("long_contexts.toml")
FORMATS = {"model": KVFormat(torch.bfloat16), "int8": INT8, "int4": INT4}  # of keys, and of values

StrategyOptions = Mapping[str, Any]  # the options of a strategy instance, as in the settings file


@cache
def read_settings() -> Mapping[str, Any]:
    """Return the settings of the server for long contexts."""
    return tomllib.loads(SETTINGS_FILE.read_text())


def get_options(strategy: str) -> StrategyOptions:
    """Return the options of an instance; without any it keeps and reads all keys and values in bfloat16."""
    options: StrategyOptions = read_settings()["strategies"].get(strategy, {})
    return {"kind": strategy, **options}


def compute_read_bytes(strategy: str, shape: ModelShape, context: float) -> float:
    """Return the bytes of keys and values that a decode step reads for a stream of `context` tokens (a mean)."""
    options = get_options(strategy)
    k, v = (FORMATS[options.get(name, "model")] for name in ("k_dtype", "v_dtype"))
    per_head = k.compute_vector_bytes(shape.head_dim) + v.compute_vector_bytes(shape.head_dim)
    return min(context, count_read_tokens(options, context)) * float(shape.layers * shape.kv_heads * per_head)


def count_read_tokens(options: StrategyOptions, context: float) -> float:
    """Return how many tokens' keys and values a decode step reads of a text of `context` tokens."""
    match options["kind"]:
        case "sliding_window":
            return float(options["sinks"] + options["window"])
        case "streaming":
            return float(options["sinks"] + options["window"] + context % options["every"])
        case "compressed":  # at the last boundary all keys beyond the budget were dropped
            since = context % options["every"]
            return float(options["budget"] * (context - since) + since)
        case "quest":  # the summaries of a block take as many bytes as one of its tokens
            chosen = max(options["min_tokens"], options["budget"] * context)
            return float(chosen + context / options["block_size"])
    return context
