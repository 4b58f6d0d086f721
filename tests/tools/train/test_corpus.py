"""The corpus: what is held out stays out, a seed tells the same text again, and weights sit where the answers are."""

import re
from collections import Counter
from functools import cache

import pytest

from server.evaluation.pieces import PieceKind
from tools.train.corpus import facts, plots, smalltalk, words
from tools.train.corpus.generator import Document, DocumentGenerator, join_text
from tools.train.corpus.packing import BOS_ID, EOS_ID, WEIGHTS, Mix, PackedRows, pack
from tools.train.corpus.templates import expand
from tools.train.corpus.words import HELD_OUT, TRAIN
from tools.train.tokenizer import sample_texts, train_tokenizer

_SLOT = re.compile(r"\\\$\w+")


def _documents(seed: int, lexicon: words.Lexicon = TRAIN, rounds: int = 12) -> list[Document]:
    teller = DocumentGenerator(seed, lexicon)
    documents = []
    for _ in range(rounds):
        documents += [teller.make_record(8000), *(tell() for tell in (teller.make_story, teller.make_chat) * 6)]
    return documents


@cache
def _training_text() -> str:
    return "\n".join(map(join_text, _documents(seed=11)))


@cache
def _rows(context: int, mix: Mix) -> tuple[PackedRows, list[str]]:
    """Packed rows, and the text of every token of the vocabulary."""
    tokenizer = train_tokenizer(sample_texts(3, rounds=20), size=1024)
    tokens = [tokenizer.decode([index]) for index in range(tokenizer.get_vocab_size())]
    return pack(tokenizer, 5, context, 6, mix), tokens


# ---- the split


@pytest.mark.parametrize("word", HELD_OUT.girls + HELD_OUT.boys + HELD_OUT.objects)
def test_held_out_words_never_occur_in_training_text(word: str) -> None:
    templates = "\n".join(
        (*plots.OPENINGS, *plots.ASIDES, *plots.CLOSINGS, *sum(plots.PLOTS, ()), str(vars(smalltalk)))
    )
    for text in (_training_text(), templates):
        assert not re.search(rf"\b{word}\b", text, re.IGNORECASE)


@pytest.mark.parametrize("kind", facts.KINDS)
def test_held_out_phrasings_never_occur_in_training_text(kind: facts.FactKind) -> None:
    for phrasing in (*kind.held_out.statements, *kind.held_out.questions, *kind.held_out.answers):
        pattern = _SLOT.sub(r"[\\w ]+?", re.escape(phrasing)).replace("@", r"\w+")
        assert not re.search(pattern, _training_text()), phrasing


def test_lexicons_share_no_name_and_no_object() -> None:
    for field in ("girls", "boys", "objects"):
        assert not set(getattr(TRAIN, field)) & set(getattr(HELD_OUT, field))


@pytest.mark.parametrize("kind", facts.KINDS)
@pytest.mark.parametrize("held_out", [False, True])
def test_every_phrasing_holds_the_value_once_and_what_it_speaks_of(kind: facts.FactKind, held_out: bool) -> None:
    phrasings = kind.phrasings(held_out)
    for sentence in (*phrasings.statements, *phrasings.answers):
        assert sentence.count(" @") == 1, sentence
    for sentence in (*phrasings.statements, *phrasings.questions):
        assert all(re.search(rf"\${slot}\b", sentence) for slot in kind.key_slots), sentence


def test_held_out_text_uses_the_held_out_half() -> None:
    text = "\n".join(map(join_text, _documents(2, HELD_OUT)))
    assert all(re.search(rf"\b{name}\b", text) for name in HELD_OUT.objects)


# ---- the text


def test_a_seed_tells_the_same_text_again() -> None:
    assert _documents(4, rounds=2) == _documents(4, rounds=2)
    assert _documents(4, rounds=2) != _documents(5, rounds=2)


def test_articles_fit_their_words() -> None:
    text = _training_text()
    assert not re.findall(r"\b[Aa] [aeio]\w+", text)
    assert not re.findall(r"\b[Aa]n (?!hour|honest)[^aeiouAEIOU]\w+", text)


def test_text_is_plain_and_every_template_is_filled() -> None:
    text = _training_text()
    assert text.isascii()
    assert not re.search(r"[$@|\[\]]", text)


def test_sentences_begin_with_capitals() -> None:
    assert not re.findall(r"[.!?] [a-z]\w*", _training_text())


def test_every_template_expands() -> None:
    teller = DocumentGenerator(1)
    slots = teller._slots(*teller.draw_cast(2))
    for template in (*plots.OPENINGS, *plots.ASIDES, *plots.CLOSINGS, *sum(plots.PLOTS, ())):
        assert expand(teller.rng, template, slots)[-1] in '.!?"', template


def test_stories_end_with_the_end_token() -> None:
    assert DocumentGenerator(1).make_story()[-1].kind is PieceKind.END


def test_facts_are_asked_at_most_twice_and_near_and_far() -> None:
    teller, distances = DocumentGenerator(9), []
    for _ in range(30):
        stated, asked, position = {}, Counter[int](), 0
        for piece in teller.make_record(8000):
            if piece.kind is PieceKind.VALUE:
                stated[piece.fact] = position
            elif piece.kind is PieceKind.ANSWER:
                asked[piece.fact] += 1
                distances.append(position - stated[piece.fact])
            position += len(piece.text)
        assert max(asked.values()) <= 2
    assert sum(distance > 2000 for distance in distances) > len(distances) / 5
    assert sum(distance < 500 for distance in distances) > len(distances) / 5


def test_nobody_who_is_the_answer_speaks_in_its_sentence() -> None:
    """A speaker with the answer's name would give the answer away right before it."""
    spoken = r'"[^"]*\?" asked (\w+)\. "([^"]*)," said (\w+)\.'
    found = re.findall(spoken, " ".join(join_text(DocumentGenerator(seed).make_record(20_000)) for seed in range(12)))
    assert len(found) > 50
    for asking, answer, telling in found:
        assert not {asking, telling} & set(re.findall(r"\w+", answer))


# ---- packing


@pytest.mark.parametrize("context", [512, 2048])
def test_weights_align_with_answers(context: int) -> None:
    rows, tokens = _rows(context, Mix(stories=0, records=1))
    assert sum(map(len, rows.answers)) > 10
    for ids, weights, answers in zip(rows.ids, rows.weights, rows.answers, strict=True):
        for answer in answers:
            span = range(answer.start, answer.stop)
            source = answer.start - answer.distance
            assert all(weights[index] == WEIGHTS[PieceKind.ANSWER] for index in span)
            assert list(ids[source : source + len(span)]) == list(ids[answer.start : answer.stop])
            assert tokens[ids[answer.start]].startswith(" ")
            assert weights[answer.start - 1] == WEIGHTS[PieceKind.TEXT]
        weighty = sum(weight == WEIGHTS[PieceKind.ANSWER] for weight in weights)
        assert 0 <= weighty - sum(a.stop - a.start for a in answers) < 8  # the last answer may be cut off


def test_rows_begin_with_a_fresh_document_and_end_tokens_are_learnt() -> None:
    rows, _ = _rows(512, Mix(stories=1, records=0))
    assert (rows.ids[:, 0] == BOS_ID).all()
    assert (rows.weights[rows.ids == EOS_ID] == WEIGHTS[PieceKind.END]).all()
    assert (rows.ids == EOS_ID).any(axis=1).all()
