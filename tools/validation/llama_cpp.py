"""Computes tokens, predictions and greedy texts of a GGUF file with llama.cpp's server, prebuilt in xllamacpp."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np

from tools.peers.programs import ServerNeeds, ServerProgram, StartCommand, run_program
from tools.validation.predictions import GreedyText, Predictions, strip_end

TIMEOUT = 600.0  # seconds of a request
SLOTS = 8  # requests that the server computes in one batch
FORCED = 1e5  # is added to the logit of a token, so that it is chosen; what is reported does not include it
T = TypeVar("T")


@dataclass(frozen=True)
class LlamaCppServer:
    """A running server of llama.cpp, with a client of it."""

    http: httpx.Client

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """Return the tokens of a text in which special tokens are read; `add_special`: with those that begin a text."""
        body = {"content": text, "add_special": add_special, "parse_special": True}
        tokens: list[int] = self._post("/tokenize", body)["tokens"]
        return tokens

    def predict(self, windows: Sequence[Sequence[int]], predicted: int) -> Predictions:
        """Predict the last `predicted` tokens of each window.

        The server has no log-probabilities of a prompt, so each of these tokens is a request for one token, which
        continues the one before in the same slot.
        """
        found = _map_in_slots(lambda slot, window: list(self._predict_one(slot, window, predicted)), windows)
        log_probs, likeliest = zip(*(each for window in found for each in window), strict=True)
        return Predictions(np.array(log_probs), [frozenset({token}) for token in likeliest])

    def _predict_one(self, slot: int, window: Sequence[int], predicted: int) -> Iterator[tuple[float, int]]:
        """Yield (log-probability of the token, likeliest token) of each predicted token."""
        for i in range(len(window) - predicted, len(window)):
            bias = {"logit_bias": [[window[i], FORCED]], "n_predict": 1, "n_probs": 1}
            (step,) = self._complete(slot, window[:i], bias)["completion_probabilities"]
            assert step["id"] == window[i], "the server chose another token than the one that it was forced to choose"
            yield step["logprob"], step["top_logprobs"][0]["id"]

    def continue_greedily(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, eos_ids: frozenset[int]
    ) -> list[GreedyText]:
        """Return the greedy continuation of each prompt, with the margins of its steps."""

        def continue_one(slot: int, prompt: Sequence[int]) -> GreedyText:
            answer = self._complete(slot, prompt, {"n_predict": max_tokens, "n_probs": 2})
            ranked = [[each["logprob"] for each in step["top_logprobs"]] for step in answer["completion_probabilities"]]
            return GreedyText(strip_end(answer["tokens"], eos_ids), [best - second for best, second in ranked])

        return _map_in_slots(continue_one, prompts)

    def _complete(self, slot: int, prompt: Sequence[int], body: dict[str, Any]) -> dict[str, Any]:
        greedy = {
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "return_tokens": True,
            "id_slot": slot,
            "cache_prompt": True,
        }
        return self._post("/completion", {"prompt": list(prompt)} | greedy | body)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.post(path, json=body).raise_for_status().json()
        return answer


def _map_in_slots(call: Callable[[int, Sequence[int]], T], texts: Sequence[Sequence[int]]) -> list[T]:
    """Return call(slot, text) of each text; as many calls run at a time as the server has slots, each in its own."""
    found: list[T] = []
    with ThreadPoolExecutor(SLOTS) as pool:
        for i in range(0, len(texts), SLOTS):
            found += pool.map(call, range(SLOTS), texts[i : i + SLOTS])
    return found


@contextmanager
def serve_llama_cpp(file: Path, cache_type: str, threads: int, tokens: int) -> Iterator[LlamaCppServer]:
    """Serve a GGUF file until the block ends; `tokens` is the length of the longest text.

    `cache_type` (f32 or q8_0) is that of keys and values. Raises RunError if the server does not start.
    """

    def make_command(needs: ServerNeeds, port: int) -> StartCommand:
        arguments = map(str, (file, port, threads, needs.streams, needs.tokens, cache_type))
        # threads that wait for others should leave the processor to them, if other programs run as well
        environment = {"OMP_WAIT_POLICY": "passive"}
        return StartCommand([sys.executable, "-m", "tools.validation.llama_cpp_server", *arguments], environment)

    program = ServerProgram("llama.cpp", get_llama_cpp_version(), "/health", make_command)
    with (
        run_program(program, ServerNeeds(SLOTS, tokens)) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT, trust_env=False) as http,
    ):
        yield LlamaCppServer(http)


def get_llama_cpp_version() -> str:
    """Return the version of the package with llama.cpp, as it is installed."""
    return f"xllamacpp {version('xllamacpp')}"
