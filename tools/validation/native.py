"""Computes predictions of a GGUF file with `llama-perplexity`, built from source."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.peers.llama_cpp import find_program
from tools.server_process import RunError, start_process
from tools.validation.predictions import Predictions

PROGRAM = "llama-perplexity"
MAGIC = b"_logits_"  # the first bytes of a file of --save-all-logits
PERPLEXITY = re.compile(r"Final estimate: PPL = ([0-9.]+)")
TIMEOUT = 3600.0  # seconds that computing the predictions of a text may take
LOG_CHARACTERS = 1000
ATTEMPTS = 3  # the thread that prints may lose its last lines when the program ends
ROW_HEAD = 4  # 16-bit words before the log-probabilities of a position: two float32, scale and least value


@dataclass(frozen=True)
class NativeLlamaCpp:
    """The programs of llama.cpp in `folder`, run with one GGUF file and one number format of keys and values."""

    folder: Path
    file: Path
    threads: int
    cache_type: str  # f32 or q8_0

    def predict(self, text: Path, windows: Sequence[Sequence[int]], scratch: Path) -> Predictions:
        """Predict the second half of each window with `llama-perplexity`; they are the beginning of the text.

        `scratch` is a folder with room for all logits. Raises RunError if the program fails, or reads other tokens.
        """
        saved = scratch / "logits"
        # one window at a time: a batch of several has the same predictions and needs more memory
        window = str(len(windows[0]))
        size = ["-c", window, "-b", window, "--chunks", str(len(windows))]
        for _ in range(ATTEMPTS):
            output = self._run(["-f", str(text), "--save-all-logits", str(saved), *size])
            if (found := PERPLEXITY.search(output)) is not None:
                break
        else:
            raise RunError(f"{PROGRAM} printed no perplexity:\n{output[-LOG_CHARACTERS:]}")
        read, predictions = read_predictions(saved, float(found[1]))
        saved.unlink()
        # from the second window on, it puts the token that begins a text in place of the first token only to compute
        if [each[1:] for each in read] != [list(each[1:]) for each in windows]:
            raise RunError(f"{PROGRAM} read other tokens than llama.cpp's server")
        return predictions

    def _run(self, arguments: Sequence[str]) -> str:
        command = [str(find_program(self.folder, PROGRAM)), *self._common_flags(), *arguments]
        with start_process(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                output, _ = process.communicate(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                raise RunError(f"{PROGRAM} took more than {TIMEOUT:g} seconds") from None
        if process.returncode:
            raise RunError(f"{PROGRAM} failed:\n{output[-LOG_CHARACTERS:]}")
        return str(output)

    def _common_flags(self) -> list[str]:
        threads, cache = str(self.threads), self.cache_type
        # quantized values need flash attention, and float32 ones are exact without it
        flash = "off" if cache == "f32" else "on"
        return ["-m", str(self.file), "-t", threads, "-tb", threads, "-ctk", cache, "-ctv", cache, "-fa", flash]


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
