"""Computes predictions and greedy texts of a GGUF file with `kvmux serve`, over HTTP, under each strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from cache_strategies.registry import list_kinds
from config.settings_file import format_tables
from tools.server_process import run_server
from tools.validation.predictions import GreedyText, Predictions, strip_end

TIMEOUT = 600.0  # seconds of a request

# Options with which a strategy drops or rounds something within a window of the text; the name is the instance's.
INSTANCES: Mapping[str, Mapping[str, Any]] = {
    "paged_int8": {"kind": "paged", "k_dtype": "int8", "v_dtype": "int8"},
    "sliding_window_quarter": {"kind": "sliding_window", "window": 0.25},
    "compressed_half": {"kind": "compressed", "budget": 0.5, "every": 64},
    "streaming_quarter": {"kind": "streaming", "window": 0.25, "every": 64},
    "quest_quarter": {"kind": "quest", "budget": 0.25, "min_tokens": 32, "block_size": 8},
}
EXACT_KINDS = ("paged", "contiguous", "mirrored")


@dataclass(frozen=True)
class KvmuxServer:
    """A running `kvmux serve`, with a client of it."""

    http: httpx.Client
    model: str
    strategies: Mapping[str, bool]  # whether each instance promises to be exact, by name

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """Return the tokens of a text; `add_special`: with those that begin a text."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": add_special}
        tokens: list[int] = self.http.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        return tokens

    def predict(self, strategy: str, windows: Sequence[Sequence[int]], predicted: int) -> Predictions:
        """Predict the last `predicted` tokens of each window, as log-probabilities of a prompt."""
        log_probs: list[float] = []
        likeliest: list[frozenset[int]] = []
        choices = self._complete(strategy, windows, {"max_tokens": 1, "prompt_logprobs": 1})
        for window, choice in zip(windows, choices, strict=True):
            scores = choice["prompt_logprobs"]
            for i in range(len(window) - predicted, len(window)):
                log_probs.append(scores[i][str(window[i])]["logprob"])
                likeliest.append(frozenset(int(token) for token, each in scores[i].items() if each["rank"] == 1))
        return Predictions(np.array(log_probs), likeliest)

    def continue_greedily(
        self, strategy: str, prompts: Sequence[Sequence[int]], max_tokens: int, eos_ids: frozenset[int]
    ) -> list[GreedyText]:
        """Return the greedy continuation of each prompt, computed in one batch."""
        body = {"max_tokens": max_tokens, "temperature": 0, "logprobs": 2, "return_token_ids": True}
        texts = []
        for choice in self._complete(strategy, prompts, body | {"return_tokens_as_token_ids": True}):
            ranked = [sorted(each.values(), reverse=True) for each in choice["logprobs"]["top_logprobs"]]
            margins = [best - second for best, second, *_ in ranked]
            texts.append(GreedyText(strip_end(choice["token_ids"], eos_ids), margins))
        return texts

    def _complete(self, strategy: str, prompts: Sequence[Sequence[int]], body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the choices of a request for all prompts, in their order."""
        request = {"model": self.model, "kv_cache": strategy, "prompt": [list(each) for each in prompts]} | body
        answer = self.http.post("/v1/completions", json=request).raise_for_status().json()
        choices: list[dict[str, Any]] = sorted(answer["choices"], key=lambda choice: choice["index"])
        return choices


@contextmanager
def serve(
    file: Path, dtype: str, weights: str, threads: int, window: int, longest: int, scratch: Path
) -> Iterator[KvmuxServer]:
    """Serve a GGUF file under every kind of strategy until the block ends; texts have at most `longest` tokens.

    Raises RunError if the server does not start.
    """
    config = scratch / "kvmux.toml"
    config.write_text(make_config(window), encoding="utf-8")
    flags = ["--config", str(config), "--model", str(file), "--dtype", dtype, "--weights", weights]
    flags += ["--threads", str(threads)]
    size = ["--max-seq-len", str(longest), "--kv-memory", "1GiB", "--log-level", "warning"]
    with (
        run_server([*flags, *size]) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT, trust_env=False) as http,
    ):
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        listed = http.get("/v1/kv_cache").raise_for_status().json()["data"]
        yield KvmuxServer(http, model, {each["name"]: each["contract"]["exact"] for each in listed})


def list_strategies() -> list[str]:
    """List the names of the instances that are served: those of the settings, and one that is always there."""
    return [*_make_instances(), "sliding_window"]


def _make_instances() -> dict[str, Mapping[str, Any]]:
    """Return the options of an instance of each kind, plug-ins' too.

    Kinds that are neither exact nor in INSTANCES have their default options.
    """
    known = {*EXACT_KINDS, *(each["kind"] for each in INSTANCES.values())}
    others = sorted(set(list_kinds()) - known)
    return {**{name: {"kind": name} for name in (*EXACT_KINDS, *others)}, **INSTANCES}


def make_config(window: int) -> str:
    """Return the settings file, with options that fit windows of this length."""
    fitted = {
        name: {option: int(value * window) if option == "window" else value for option, value in options.items()}
        for name, options in _make_instances().items()
    }
    return format_tables("strategies", fitted)
