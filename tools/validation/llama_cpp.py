"""Computes predictions and greedy texts of a GGUF file with llama.cpp's own programs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np

from server.profiling.running import RunError, start_process
from tools.peers.llama_cpp import find_program
from tools.peers.programs import ServerNeeds, ServerProgram, StartCommand, run_program
from tools.validation.predictions import GreedyText, Predictions, strip_end

MAGIC = b"_logits_"  # the first bytes of a file of --save-all-logits
PERPLEXITY = re.compile(r"Final estimate: PPL = ([0-9.]+)")
TIMEOUT = 3600.0  # seconds that computing the predictions of a text may take
LOG_CHARACTERS = 1000
ATTEMPTS = 3  # the thread that prints may lose its last lines when the program ends
ROW_HEAD = 4  # 16-bit words before the log-probabilities of a position: two float32, scale and least value


class LlamaCppText(NamedTuple):
    """The tokens of a text as llama.cpp splits it, and its predictions."""

    windows: Sequence[Sequence[int]]  # [windows][tokens]
    predictions: Predictions


@dataclass(frozen=True)
class LlamaCpp:
    """The programs of llama.cpp in `folder`, run with one GGUF file and one number format of keys and values."""

    folder: Path
    file: Path
    threads: int
    cache_type: str  # f16, f32, q8_0, ...

    def predict(self, text: Path, window: int, num_windows: int, scratch: Path) -> LlamaCppText:
        """Predict a text with `llama-perplexity`; `scratch` is a folder with room for all logits.

        Raises RunError if the program fails, such as for a text of less than two windows.
        """
        saved = scratch / "logits"
        # one window at a time: a batch of several has the same predictions and needs more memory
        size = ["-c", str(window), "-b", str(window), "--chunks", str(num_windows)]
        for _ in range(ATTEMPTS):
            output = self._run("llama-perplexity", ["-f", str(text), "--save-all-logits", str(saved), *size])
            if (found := PERPLEXITY.search(output)) is not None:
                break
        else:
            raise RunError(f"llama-perplexity printed no perplexity:\n{output[-LOG_CHARACTERS:]}")
        windows, predictions = read_predictions(saved, float(found[1]))
        saved.unlink()
        return LlamaCppText(windows, predictions)

    def _run(self, name: str, arguments: Sequence[str]) -> str:
        command = [str(find_program(self.folder, name)), *self._common_flags(), *arguments]
        with start_process(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                output, _ = process.communicate(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                raise RunError(f"{name} took more than {TIMEOUT:g} seconds") from None
        if process.returncode:
            raise RunError(f"{name} failed:\n{output[-LOG_CHARACTERS:]}")
        return str(output)

    def _common_flags(self) -> list[str]:
        threads, cache = str(self.threads), self.cache_type
        # quantized values need flash attention, and float32 ones are exact without it
        flash = "off" if cache == "f32" else "on"
        return ["-m", str(self.file), "-t", threads, "-tb", threads, "-ctk", cache, "-ctv", cache, "-fa", flash]

    def continue_greedily(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, eos_ids: frozenset[int]
    ) -> list[GreedyText]:
        """Return the greedy texts of `llama-server`. Raises RunError if it does not start."""
        needs = ServerNeeds(1, max(map(len, prompts)) + max_tokens + 1)
        program = ServerProgram("llama.cpp", "", "/health", self._make_command)
        with (
            run_program(program, needs) as server,
            httpx.Client(base_url=server.url, timeout=TIMEOUT, trust_env=False) as http,
        ):
            texts = [self._continue_one(http, prompt, max_tokens) for prompt in prompts]
        return [GreedyText(strip_end(each, eos_ids)) for each in texts]

    def _make_command(self, needs: ServerNeeds, port: int) -> StartCommand:
        size = ["-np", "1", "-c", str(needs.tokens), "--cache-ram", "0"]
        address = ["--host", "127.0.0.1", "--port", str(port)]
        return StartCommand([str(find_program(self.folder, "llama-server")), *self._common_flags(), *size, *address])

    @staticmethod
    def _continue_one(http: httpx.Client, prompt: Sequence[int], max_tokens: int) -> list[int]:
        greedy = {"temperature": 0, "top_k": 1, "repeat_penalty": 1, "n_predict": max_tokens}
        body = {"prompt": list(prompt), "return_tokens": True, "cache_prompt": False, **greedy}
        answer = http.post("/completion", json=body).raise_for_status().json()
        tokens: list[int] = answer["tokens"]
        return tokens


def read_predictions(file: Path, perplexity: float) -> tuple[list[list[int]], Predictions]:
    """Read a file of --save-all-logits; return (the tokens of each window, the predictions).

    `perplexity` is what the program printed: the file does not have all that it was computed from.

    The file has, after MAGIC, int32 numbers: window length, vocabulary, windows, and all tokens. For each position a
    row follows: scale and least log-probability as float32, and a 16-bit number for each token of the vocabulary
    (tools/perplexity/perplexity.cpp). A log-probability is scale x number + least; those more than 16 nats below the
    likeliest are raised to that bound. Raises RunError if the file is of another kind.
    """
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise RunError(f"{file} is no file of --save-all-logits")
        window, vocab_size, num_windows = (int(n) for n in np.fromfile(opened, np.int32, 3))
        tokens = np.fromfile(opened, np.int32, window * num_windows).reshape(num_windows, window)
        offset = opened.tell()
    first = window // 2  # position of the first token of a window that is not only read
    width = ROW_HEAD + 2 * ((vocab_size + 1) // 2)
    rows = np.memmap(file, np.uint16, "r", offset, (num_windows * (window - 1 - first), width))
    targets = tokens[:, first + 1 :].reshape(-1)
    log_probs, is_least = np.empty(len(rows)), np.zeros(len(rows), np.bool_)
    likeliest = []
    for i, (row, target) in enumerate(zip(rows, targets, strict=True)):
        scale, least = row[:ROW_HEAD].view(np.float32)
        numbers = row[ROW_HEAD : ROW_HEAD + vocab_size]
        log_probs[i] = float(scale) * float(numbers[target]) + float(least)
        is_least[i] = numbers[target] == 0
        likeliest.append(frozenset(np.flatnonzero(numbers == numbers.max()).tolist()))
    return tokens.tolist(), Predictions(log_probs, likeliest, perplexity, is_least)
