"""The comparison against transformers, which sees what each strategy keeps through a mask of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from config.errors import SettingsError
from server.engine.build import Engine
from server.engine.instance_reports import read_usage
from server.evaluation.compare import Fidelity, compare
from server.evaluation.documents import Document
from server.evaluation.pieces import MarkedAnswer

NAMES = ["contiguous", "paged", "narrow", "sinks"]
LENGTH = 160  # all that a cache of this engine can hold


ROW = 5  # all that "sinks" takes in a step


def _documents(*lengths: int) -> list[Document]:
    numbers = torch.Generator().manual_seed(3)
    return [
        Document(
            torch.randint(2, 300, (n + 1,), generator=numbers).tolist(),
            [MarkedAnswer(10, 12, 7), MarkedAnswer(n, n + 1, 90)],
        )
        for n in lengths
    ]


def _read(engine: Engine, documents: list[Document], row_tokens: int, last: int | None = None) -> dict[str, Fidelity]:
    caches = [engine.core.instances[name] for name in NAMES]
    results = compare(engine.core.model, caches, documents, row_tokens=row_tokens, last=last)
    assert all(read_usage(cache).seats == 0 for cache in caches)
    return dict(zip(NAMES, results, strict=True))


def _visible(n: int, window: int, sinks: int) -> Tensor:
    query, key = torch.arange(n).view(-1, 1), torch.arange(n)
    return (key <= query) & ((query - key < window) | (key < sinks))


@torch.no_grad()
def _logits(reference: LlamaForCausalLM, document: Document, visible: Tensor) -> Tensor:
    """[n, V], of a model whose queries see the keys of `visible` [n, n]."""
    mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    logits: Tensor = reference(torch.tensor([document.ids[:-1]]), attention_mask=mask[None, None]).logits
    return logits[0].double()


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return _documents(LENGTH, 61)


@pytest.mark.parametrize(("name", "window", "sinks"), [("contiguous", LENGTH, 0), ("narrow", 24, 0), ("sinks", 24, 4)])
def test_figures_are_those_of_transformers(
    engine: Engine, reference: LlamaForCausalLM, documents: list[Document], name: str, window: int, sinks: int
) -> None:
    surprise, divergence, agreed, right = [], [], [], []
    for document in documents:
        n = len(document.ids) - 1
        targets = torch.tensor(document.ids[1:])
        exact = _logits(reference, document, _visible(n, n, 0)).log_softmax(-1)
        lossy = _logits(reference, document, _visible(n, window, sinks)).log_softmax(-1)
        surprise.append(-lossy[torch.arange(n), targets])
        divergence.append((exact.exp() * (exact - lossy)).sum(-1))
        agreed.append(exact.argmax(-1) == lossy.argmax(-1))
        right.append(lossy.argmax(-1) == targets)
    found = _read(engine, documents, row_tokens=ROW)[name]
    assert found.num_tokens == LENGTH + 61
    assert found.perplexity == pytest.approx(torch.cat(surprise).mean().exp().item(), rel=1e-4)
    assert found.kl == pytest.approx(torch.cat(divergence).mean().item(), rel=1e-3, abs=1e-6)
    assert found.agreement == pytest.approx(torch.cat(agreed).double().mean().item(), abs=1e-9)
    pairs = [(a, r) for d, r in zip(documents, right, strict=True) for a in d.answers]
    known = [(a.distance, bool(r[a.start - 1 : a.stop - 1].all())) for a, r in pairs]
    assert found.answer_recalls == known


def test_exact_strategies_differ_in_nothing_and_windows_do(engine: Engine, documents: list[Document]) -> None:
    found = _read(engine, documents, row_tokens=ROW)
    assert found["paged"] == found["contiguous"]
    assert (found["paged"].agreement, found["paged"].kl) == (1, 0)
    assert found["narrow"].agreement < 1
    assert found["narrow"].kl > 0.01


@pytest.mark.parametrize("row_tokens", [1, 3])
def test_how_tokens_are_cut_into_steps_changes_nothing(
    engine: Engine, documents: list[Document], row_tokens: int
) -> None:
    found, other = _read(engine, documents, row_tokens), _read(engine, documents, ROW)
    for name in NAMES:
        assert found[name].perplexity == pytest.approx(other[name].perplexity, rel=1e-5)
        assert found[name].kl == pytest.approx(other[name].kl, rel=1e-4, abs=1e-7)
        assert found[name].num_agreed == other[name].num_agreed


@pytest.mark.parametrize("row_tokens", [1, ROW])
def test_the_last_tokens_count_as_they_do_among_all(engine: Engine, documents: list[Document], row_tokens: int) -> None:
    found, of_all = _read(engine, documents, row_tokens, last=7), _read(engine, documents, row_tokens)
    for name in NAMES:
        ends = [of_all[name].kls[LENGTH - 7 : LENGTH], of_all[name].kls[LENGTH + 61 - 7 :]]
        assert found[name].kls == pytest.approx([*ends[0], *ends[1]], rel=1e-3, abs=1e-6)
        assert found[name].num_tokens == 14
    assert found["narrow"].kl_quantile(0.5) == pytest.approx(float(np.median(found["narrow"].kls)))
    assert _read(engine, documents, ROW, last=LENGTH)["narrow"].num_tokens == LENGTH + 61


def test_a_known_answer_counts(engine: Engine, reference: LlamaForCausalLM) -> None:
    """A text that the model continues itself: each of its tokens is the likeliest one."""
    ids = _documents(20)[0].ids[:-1]
    for _ in range(30):
        document = Document([*ids, 0])
        ids = [*ids, int(_logits(reference, document, _visible(len(ids), len(ids), 0))[-1].argmax())]
    answers = [MarkedAnswer(21, 25, 3), MarkedAnswer(40, 41, 30), MarkedAnswer(15, 22, 30)]
    found = _read(engine, [Document(ids, answers)], row_tokens=4)["paged"]
    assert found.answer_recalls == [(3, True), (30, True), (30, False)]
    assert found.recall(1, 3) == (1, 1)
    assert found.recall(4, 64) == (1, 2)


def test_tells_how_far_it_has_come(engine: Engine, documents: list[Document]) -> None:
    told: list[int] = []
    cache = engine.core.instances["paged"]
    compare(engine.core.model, [cache], documents, row_tokens=100, on_tokens_read=told.append)
    assert told == [100, 60, 61]


def test_too_little_memory_is_reported_at_once(engine: Engine, documents: list[Document]) -> None:
    caches = [engine.core.instances["contiguous"]] * 40
    told: list[int] = []
    with pytest.raises(SettingsError, match="no room for a document under contiguous: raise --kv-memory"):
        compare(engine.core.model, caches, documents, row_tokens=8, on_tokens_read=told.append)
    assert not told


@pytest.mark.parametrize("length", [1, 31, 32, 33, LENGTH])
def test_every_document_finds_empty_caches(engine: Engine, length: int) -> None:
    documents = _documents(*[length] * 7)
    _read(engine, documents, row_tokens=ROW)
    assert engine.core.memory.usage == 0


def test_what_is_no_number_is_reported(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine.core.model
    monkeypatch.setattr(model, "_norm", torch.full_like(model._norm, torch.nan))
    with pytest.raises(SettingsError, match="logits are not finite"):
        compare(model, [engine.core.instances["paged"]], _documents(20), row_tokens=8)


def test_a_hopeless_perplexity_is_infinite() -> None:
    assert Fidelity(num_tokens=1, total_nll=1e6).perplexity == math.inf
