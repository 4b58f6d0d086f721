"""Predictions and greedy texts of two programs are compared, and llama.cpp's file of logits is read."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.peers.llama_cpp import find_program
from tools.server_process import RunError
from tools.validation.native import NativeLlamaCpp, read_predictions
from tools.validation.predictions import Agreement, GreedyAgreement, GreedyText, Predictions, count_equal


def predictions(log_probs: list[float], likeliest: list[int]) -> Predictions:
    return Predictions.from_log_probs(log_probs, [frozenset({token}) for token in likeliest])


def test_predictions_are_compared_by_position() -> None:
    base = predictions([-1.0, -2.0, -3.0, -2.0], [1, 2, 3, 4])
    own = predictions([-1.0, -2.5, -2.0, -2.0], [1, 2, 9, 4])
    found = Agreement.between(own, base)
    assert found.positions == 4
    assert found.perplexity == pytest.approx(math.exp(7.5 / 4))
    assert found.perplexity_ratio == pytest.approx(math.exp(-0.5 / 4))
    assert (found.mean_difference, found.max_difference) == pytest.approx((1.5 / 4, 1.0))
    assert found.same_top == 0.75
    equal = Agreement.between(base, base)
    assert (equal.perplexity_ratio, equal.max_difference, equal.same_top) == (1, 0, 1)


def test_one_of_several_equally_likely_tokens_is_enough() -> None:
    base = Predictions.from_log_probs([-1.0], [frozenset({3, 4})])
    assert Agreement.between(predictions([-1.0], [4]), base).same_top == 1


def test_an_upper_bound_can_only_be_exceeded() -> None:
    base = Predictions(np.array([-16.0, -16.0, -1.0]), [frozenset({1})] * 3, 2.0, np.array([True, True, False]))
    found = Agreement.between(predictions([-19.0, -15.5, -1.25], [1, 1, 1]), base)
    assert (found.max_difference, found.mean_difference) == pytest.approx((0.5, 0.25))
    assert found.perplexity_ratio == pytest.approx(found.perplexity / 2)


def test_a_greedy_text_differs_without_a_near_tie() -> None:
    sure = [5.0, 5.0, 5.0]
    theirs = [GreedyText(ids, sure) for ids in ([1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 3])]
    theirs[1] = GreedyText([1, 2, 3], [5.0, 0.002, 5.0])
    ours = [
        GreedyText([1, 2, 3], sure),
        GreedyText([1, 7, 3], [5.0, 0.001, 5.0]),  # a near tie
        GreedyText([1, 2, 9], [5.0, 5.0, 1.0]),
        GreedyText([1, 2, 3], [5.0, 5.0, 2.0]),  # theirs ends
        GreedyText([4, 2, 3], [0.001, 5.0, 5.0]),  # a near tie only for us
    ]
    found = GreedyAgreement.between(ours, theirs)
    assert (found.texts, found.equal_texts) == (5, 1)
    assert (found.tokens, found.equal_tokens) == (14, 3 + 1 + 2 + 2)
    assert found.margins == [0.002, 5.0, 5.0, 5.0]
    assert found.count_clear(0.01) == 3
    assert found.count_clear(0.001) == 4


def test_the_beginning_that_two_texts_share() -> None:
    assert [count_equal(a, b) for a, b in (([], [1]), ([1, 2], [1, 2]), ([1, 2], [1, 3]), ([1], [1, 2]))] == [
        0,
        2,
        1,
        1,
    ]


def write_logits(file: Path, tokens: list[list[int]], logits: torch.Tensor) -> torch.Tensor:
    """Write a file as llama.cpp does, from logits [windows, window, vocabulary]; return the exact log-probabilities."""
    window, vocab_size = len(tokens[0]), logits.shape[-1]
    log_probs = logits.double().log_softmax(-1)
    with file.open("wb") as out:
        out.write(b"_logits_" + struct.pack("<3i", window, vocab_size, len(tokens)))
        out.write(struct.pack(f"<{window * len(tokens)}i", *(token for each in tokens for token in each)))
        for w in range(len(tokens)):
            for position in range(window // 2, window - 1):
                row = log_probs[w, position]
                top, least = row.max().item(), max(row.min().item(), row.max().item() - 16)
                scale = (top - least) / 65535
                numbers = [round(max(0.0, value - least) / scale) for value in row.tolist()]
                out.write(struct.pack("<2f", scale, least) + struct.pack(f"<{vocab_size}H", *numbers))
                out.write(b"\0\0" * (vocab_size % 2))
    return log_probs


@pytest.mark.parametrize("vocab_size", [10, 11])
def test_a_file_of_logits_is_read(tmp_path: Path, vocab_size: int) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(vocab_size, (3, 8)).tolist()
    exact = write_logits(tmp_path / "logits", tokens, 3 * torch.randn(3, 8, vocab_size))
    windows, found = read_predictions(tmp_path / "logits", 3.5)
    assert windows == tokens
    expected = [exact[w, i - 1, tokens[w][i]].item() for w in range(3) for i in range(5, 8)]
    assert found.log_probs.tolist() == pytest.approx(expected, abs=16 / 65535)
    assert found.perplexity == 3.5
    assert found.likeliest == [frozenset({int(exact[w, i - 1].argmax())}) for w in range(3) for i in range(5, 8)]


def test_unlikely_tokens_have_an_upper_bound(tmp_path: Path) -> None:
    logits = torch.zeros(1, 8, 10)
    logits[..., 3] = 30.0
    write_logits(tmp_path / "logits", [[3, 3, 3, 3, 3, 3, 4, 3]], logits)
    _, found = read_predictions(tmp_path / "logits", 3.5)
    assert found.is_upper_bound is not None
    assert found.is_upper_bound.tolist() == [False, True, False]
    assert found.log_probs[1] == pytest.approx(-16, abs=1e-3)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(b"GGUF\0\0\0\0\0\0\0\0")
    with pytest.raises(RunError, match="no file of --save-all-logits"):
        read_predictions(tmp_path / "it", 3.5)


def test_llama_perplexity_has_to_read_the_same_tokens(tmp_path: Path) -> None:
    """A program in the place of llama-perplexity writes a file of logits, whose windows begin with 0, 5, 5."""
    tokens = [[0, 2, 3, 4, 1, 2, 3, 4], [5, 3, 4, 5, 1, 2, 3, 4], [5, 4, 5, 6, 1, 2, 3, 4]]
    logits = torch.randn(3, 8, 10)
    exact = write_logits(tmp_path / "prepared", tokens, logits)
    program = find_program(tmp_path, "llama-perplexity")
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!{sys.executable}\nimport shutil, sys\n"
        "assert sys.argv[sys.argv.index('-c') + 1] == '8' and sys.argv[sys.argv.index('--chunks') + 1] == '3'\n"
        f"shutil.copy({str(tmp_path / 'prepared')!r}, sys.argv[sys.argv.index('--save-all-logits') + 1])\n"
        "print('Final estimate: PPL = 3.5000 +/- 0.1')\n"
    )
    program.chmod(0o755)
    llama_cpp = NativeLlamaCpp(tmp_path, tmp_path / "it.gguf", 1, "f32")
    windows = [[0, *window[1:]] for window in tokens]
    found = llama_cpp.predict(tmp_path / "text", windows, tmp_path)
    assert found.log_probs[0] == pytest.approx(exact[0, 4, 2].item(), abs=1e-3)
    assert found.perplexity == 3.5
    with pytest.raises(RunError, match="other tokens"):
        llama_cpp.predict(tmp_path / "text", [*windows[:2], windows[0]], tmp_path)
