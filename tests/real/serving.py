"""Serves a real model under every kind of strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from cache_strategies.registry import list_kinds
from config.settings_file import format_tables
from tests.end_to_end.server_process import Server, serving
from tests.patience import PATIENCE
from tests.real.model_files import find_model

SETTINGS = "kvmux.toml"
OPTIONS: Mapping[str, Mapping[str, Any]] = {  # of kinds whose defaults would keep a short text whole
    "sliding_window": {"window": 512},
    "compressed": {"budget": 0.5},
}
FORMATS: Mapping[str, Mapping[str, Any]] = {  # of keys and values in fewer bits; where a preset has them, by the preset
    "int8": {"kind": "paged", "k_dtype": "int8", "v_dtype": "int8"},
    "small": {"preset": "small"},
    "int4": {"kind": "paged", "k_dtype": "int4", "v_dtype": "int4"},
    "long": {"preset": "long"},
}

# Products in float32: otherwise types like Q8_0 are multiplied by activations of 8 bits, as in llama.cpp.
EXACT = ("--dtype", "float32", "--weights", "f32", "--weights-cache", "off")


@contextmanager
def serving_instances(
    model: str,
    folder: Path,
    *flags: str,
    instances: Mapping[str, Mapping[str, Any]],
    max_seq_len: int = 2048,
    kv_memory: str = "2GiB",
) -> Iterator[Server]:
    """Serve a real model with these strategy instances, which are written to SETTINGS in the folder."""
    config = folder / SETTINGS
    config.write_text(format_tables("strategies", instances), encoding="utf-8")
    sizes = ("--max-seq-len", str(max_seq_len), "--kv-memory", kv_memory)
    with serving("--config", str(config), "--model", str(find_model(model)), *sizes, *flags, anew=True) as server:
        yield server


@contextmanager
def serving_every_kind(
    model: str, folder: Path, *flags: str, instances: Mapping[str, Mapping[str, Any]] | None = None, **sizes: Any
) -> Iterator[Server]:
    """Serve a real model with an instance of each registered kind, under the kind's name, and those named here."""
    every = {kind: {"kind": kind, **OPTIONS.get(kind, {})} for kind in list_kinds()} | (instances or {})
    with serving_instances(model, folder, *flags, instances=every, **sizes) as server:
        yield server


@contextmanager
def connect(model: str) -> Iterator[openai.OpenAI]:
    """Serve a real model as "m", with the defaults that a newcomer gets, and connect OpenAI's client to it."""
    with (
        serving("--model", str(find_model(model)), "--kv-memory", "1GiB", "--model-name", "m", anew=True) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    """Return the choice of a chat, greedy and of 200 tokens at most unless the options say otherwise."""
    given: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 200} | options
    return client.chat.completions.create(messages=messages, **given).choices[0]


def list_exact(server: Server) -> Sequence[str]:
    """Return the instances that keep every key as it was computed."""
    return [each["name"] for each in server.get("/v1/kv_cache").json()["data"] if each["contract"]["exact"]]


def tokenize(server: Server, text: str) -> list[int]:
    """Return the tokens of a text, with the beginning that the model expects."""
    return list(server.post("/tokenize", prompt=text).json()["tokens"])
