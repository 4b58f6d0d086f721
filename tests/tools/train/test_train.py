"""Training: the planted circuit recalls at once, Muon's updates are orthogonal, a resumed run goes on."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.train.corpus.packing import RECORDS, Mix, pack
from tools.train.corpus.words import HELD_OUT_NAMES
from tools.train.induction_init import init_induction_heads
from tools.train.measure import compute_recall
from tools.train.model import Llama, LlamaShape
from tools.train.optim import orthogonalize
from tools.train.train import Trainer, TrainSettings, get_lr_scale

TOKENIZER = Path(__file__).parents[3] / "server" / "models" / "tiny" / "tokenizer.json"


def _trainer(out: Path) -> Trainer:
    shutil.copy(TOKENIZER, out / "tokenizer.json")
    settings = TrainSettings(out, 0.001, "cpu", threads=1, seed=1, step_tokens=128, workers=0, compile=False)
    return Trainer(settings, replace(LlamaShape(), layers=2, ff=64))


def _recall(model: Llama) -> list[float]:
    """Shares of known answers that stood within 256 tokens, and farther back."""
    rows = pack(Tokenizer.from_file(str(TOKENIZER)), 1, 2048, 3, RECORDS, HELD_OUT_NAMES)
    found = compute_recall(model, rows)
    parts = [[right for distance, right in found if (distance > 256) == far] for far in (False, True)]
    assert all(len(part) > 15 for part in parts)
    return [sum(part) / len(part) for part in parts]


def test_planted_model_recalls_before_training_near_and_far() -> None:
    torch.manual_seed(0)
    model = Llama(LlamaShape())
    assert max(_recall(model)) < 0.1
    init_induction_heads(model)
    assert min(_recall(model)) > 0.75


def test_muon_directions_are_orthogonal() -> None:
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonalize(torch.randn(2, 48, 32)))
    assert singular.min() > 0.5
    assert singular.max() < 1.5


def test_resumed_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = _trainer(tmp_path)
    first.step(pack(first.tokenizer, 1, 128, 1, Mix(stories=1, records=0)), share=0.0)
    first.save()
    second = _trainer(tmp_path)
    second.resume()
    assert second.progress == first.progress
    batch = pack(first.tokenizer, 2, 128, 1, Mix(stories=1, records=0))
    assert first.step(batch, share=0.5) == second.step(batch, share=0.5)
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_ends_in_time_with_a_checkpoint_and_a_measurement(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    trainer.settings = replace(trainer.settings, step_tokens=trainer.model.shape.positions)
    trainer.run()
    assert trainer.progress.seconds >= 0.001 * 60
    assert trainer.progress.tokens == trainer.progress.steps * trainer.model.shape.positions
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["steps"] == trainer.progress.steps
    assert lines[-1]["story_perplexity"] > 1
    again = _trainer(tmp_path)
    again.resume()
    assert again.progress == trainer.progress


def test_the_rate_warms_up_and_falls() -> None:
    assert get_lr_scale(0, 0) < get_lr_scale(0, 30) < get_lr_scale(0, 100) == get_lr_scale(0.39, 1000) == 1
    assert 1 > get_lr_scale(0.5, 1000) > get_lr_scale(0.9, 1000) > get_lr_scale(0.999, 1000) > 0
