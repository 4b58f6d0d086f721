"""Training: the planted circuit leans to the answer at once, Muon's updates are orthogonal, a resumed run goes on."""

import shutil
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer

from server.training.evaluate import RECORDS
from server.training.model import Llama, Shape, plant
from server.training.optim import orthogonalize
from server.training.packing import Mix, pack
from server.training.train import Settings, Trainer

TOKENIZER = Path(__file__).parents[2] / "server" / "models" / "tiny" / "tokenizer.json"


def _trainer(out: Path) -> Trainer:
    shutil.copy(TOKENIZER, out / "tokenizer.json")
    settings = Settings(out, 0.001, "cpu", threads=1, seed=1, step_tokens=128, workers=0, compile=False)
    return Trainer(settings, replace(Shape(), layers=2, ff=64))


@torch.no_grad()
def _median_rank_of_answers(model: Llama) -> float:
    """Over the answers of some records: how many tokens the model finds likelier than the right one."""
    rows = pack(Tokenizer.from_file(str(TOKENIZER)), 1, 256, 8, RECORDS)
    ranks = []
    for ids, answers in zip(rows.ids.astype("int64"), rows.answers, strict=True):
        logits = model(torch.from_numpy(ids[None, :-1]))[0]  # (T, vocabulary)
        ranks += [int((logits[a.start - 1] > logits[a.start - 1, ids[a.start]]).sum()) for a in answers]
    return median(ranks)


def test_planted_model_leans_to_the_answer_before_training() -> None:
    torch.manual_seed(0)
    model = Llama(Shape())
    assert _median_rank_of_answers(model) > 500
    plant(model)
    assert _median_rank_of_answers(model) < 200


def test_muon_directions_are_orthogonal() -> None:
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonalize(torch.randn(2, 48, 32)))
    assert singular.min() > 0.5
    assert singular.max() < 1.5


def test_resumed_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = _trainer(tmp_path)
    first.step(pack(first.tokenizer, 1, 128, 1, Mix(1, 0, 0)), share=0.0)
    first.save()
    second = _trainer(tmp_path)
    second.resume()
    assert second.done == first.done
    batch = pack(first.tokenizer, 2, 128, 1, Mix(1, 0, 0))
    assert first.step(batch, share=0.5) == second.step(batch, share=0.5)
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
