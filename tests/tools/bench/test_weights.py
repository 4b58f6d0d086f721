"""What fewer bits cost, against transformers on weights that are rounded in the same way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from config.settings import load_settings
from server.engine.build import build_engine
from server.engine.device import WEIGHT_FORMATS
from server.evaluation.documents import Document
from server.evaluation.pieces import MarkedAnswer
from tests.models.random_models import save_random_model
from tests.models.rounded_weights import round_weights
from tools.bench.__main__ import FAILED, main
from tools.bench.weights import compare_models


def test_figures_are_those_of_transformers(tmp_path: Path) -> None:
    save_random_model("llama", tmp_path)
    whole, less_exact = (LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).double() for _ in range(2))
    with torch.no_grad():
        round_weights(less_exact, WEIGHT_FORMATS["int4"])
    ids = torch.randint(2, 300, (61,))
    known = int(whole(ids[None]).logits[0, 39].argmax())
    ids[40] = known
    flags = {
        "model": str(tmp_path),
        "dtype": "float32",
        "max_seq_len": 61,
        "max_num_seqs": 1,
        "kernels": "reference",
        "weights_cache": "off",
    }
    models = [build_engine(load_settings(None, flags | {"weights": kept})).core.model for kept in ("f32", "int4")]
    exact, less = compare_models(models, [Document(ids.tolist(), [MarkedAnswer(40, 41, 7)])])
    with torch.no_grad():
        p, q = (model(ids[None, :-1]).logits[0].log_softmax(-1) for model in (whole, less_exact))
    assert (exact.agreement, exact.kl, exact.answer_recalls) == (1.0, 0.0, [(7, True)])
    assert less.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert less.kl > 1e-5
    assert less.agreement == (p.argmax(-1) == q.argmax(-1)).double().mean()
    assert less.perplexity == pytest.approx(float((-q.gather(-1, ids[1:, None])).mean().exp()), rel=1e-4)
    assert less.answer_recalls == [(7, int(q[39].argmax()) == known)]


def test_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    size = ["--weights", "f32", "int8", "--length", "200", "--texts", "1", "--records", "1", "--kernels", "reference"]
    assert main(["weights", *size, "--json", str(file)]) == 0
    found = {(each["variant"], each["what"]): each["value"] for each in json.loads(file.read_text())["rows"]}
    numbers, others = (4 * (512 + 256 + 1280 + 640) + 2048) * 256, 9 * 256
    assert found["f32", "bytes"] == 4 * (numbers + others)
    assert found["int8", "bytes"] == numbers * 34 // 32 + 4 * others, "34 bytes for 32 columns"
    assert (found["f32", "likeliest token the same"], found["f32", "KL"]) == (100, 0)


def test_what_cannot_be_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "--length", "5000"]) == FAILED
    assert "max_seq_len is 5000, but the model has 2048 positions" in capsys.readouterr().out
