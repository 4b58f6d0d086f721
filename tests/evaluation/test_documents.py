"""Documents contain the whole file in order, and answers at the right tokens, for any special tokens around a text."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from config.errors import SettingsError
from server.evaluation.documents import (
    Document,
    check_vocabulary,
    find_special_tokens,
    make_questions,
    make_records,
    make_stories,
    read_text_file,
)
from server.evaluation.pieces import SpecialTokens
from server.models.files.directory import EMBEDDED
from tests.evaluation.held_out_names import HELD_OUT_NAMES, TRAINING_NAMES
from tests.models.random_models import byte_tokenizer

TINY = Tokenizer.from_file(str(EMBEDDED["tiny"] / "tokenizer.json"))
PLAIN = byte_tokenizer(300)  # puts nothing before a text
EOS = frozenset({1})


@pytest.fixture(params=[TINY, PLAIN], ids=["with a begin token", "without"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    assert isinstance(request.param, Tokenizer)
    return request.param


def test_marks_are_the_tokenizers_and_the_models() -> None:
    assert find_special_tokens(TINY, EOS, 2048) == SpecialTokens((0,), 1)
    assert find_special_tokens(PLAIN, frozenset({7, 1}), 300) == SpecialTokens((), 1)
    assert (
        find_special_tokens(TINY, frozenset({-1, 5000}), 2048).end_id
        == TINY.encode("\n", add_special_tokens=False).ids[-1]
    )


def test_what_a_tokenizer_puts_behind_a_text_does_not_begin_one() -> None:
    tokenizer = byte_tokenizer(300)
    around = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.post_processor = around
    assert find_special_tokens(tokenizer, EOS, 2048) == SpecialTokens((0,), 1)


@pytest.mark.parametrize("words", [1, 2, 30, 31, 500])
def test_stretches_of_a_file_are_all_of_it(tokenizer: Tokenizer, tmp_path: Path, words: int) -> None:
    file = tmp_path / "text"
    file.write_text(" ".join(f"word{i}" for i in range(words)) + "\nümlaut")
    marks, ids = (
        find_special_tokens(tokenizer, EOS, 2048),
        tokenizer.encode(file.read_text(), add_special_tokens=False).ids,
    )
    found = read_text_file(tokenizer, marks, 32, 10_000, file)
    begin = len(marks.begin_ids)
    assert all(tuple(d.ids[:begin]) == marks.begin_ids for d in found)
    assert all(len(d.ids) == 33 for d in found[:-1])
    assert 2 <= len(found[-1].ids) <= 33
    read = [token for d in found for token in d.ids[begin:-1]]
    assert [*read, found[-1].ids[-1]] == ids  # the last token of a stretch is the first of the next
    assert read_text_file(tokenizer, marks, 32, 2, file) == found[:2]


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.touch()
    binary.write_bytes(b"\xff\xfe\x00")
    for file, message in (
        (tmp_path / "none", "cannot read"),
        (empty, "has no text"),
        (binary, "not UTF-8"),
        (tmp_path, "cannot read"),
    ):
        with pytest.raises(SettingsError, match=f"--text: .*{message}"):
            read_text_file(PLAIN, SpecialTokens((), 1), 32, 8, file)


def test_a_byte_order_mark_is_no_text_and_line_ends_are(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert read_text_file(PLAIN, SpecialTokens((), 1), 32, 1, file)[0].ids == PLAIN.encode("a\r\nb").ids


def test_tokens_that_the_model_lacks_are_reported() -> None:
    check_vocabulary([Document([1, 299])], 300)
    with pytest.raises(SettingsError, match="gives token id 299, and the model has 299"):
        check_vocabulary([Document([1]), Document([1, 299])], 299)


def test_a_length_without_room_for_text_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("some words")
    with pytest.raises(SettingsError, match="--length: should be at least 4"):
        read_text_file(PLAIN, SpecialTokens((0, 5, 6), 1), 3, 8, file)


def test_answers_stand_where_they_say(tokenizer: Tokenizer) -> None:
    marks = find_special_tokens(tokenizer, EOS, 2048)
    found = make_records(tokenizer, marks, 1024, 12, "a seed")
    assert sum(len(d.answers) for d in found) > 8
    for ids, answers in found:
        assert len(ids) == 1025
        for answer in answers:
            before = answer.start - answer.distance
            assert ids[before : before + answer.stop - answer.start] == ids[answer.start : answer.stop]


@pytest.mark.parametrize("position", [200, 515])
def test_a_question_ends_where_it_should_and_its_fact_is_in_the_text(tokenizer: Tokenizer, position: int) -> None:
    marks = find_special_tokens(tokenizer, EOS, 2048)
    found = make_questions(tokenizer, marks, position, 20, "a seed")
    assert len(found) == 20
    for ids, (answer,) in found:
        assert ids[: len(marks.begin_ids)] == list(marks.begin_ids)
        assert (answer.start, answer.stop) == (position + 1, len(ids))
        mention = answer.start - answer.distance
        assert len(marks.begin_ids) <= mention < answer.start - 64
        assert ids[mention : mention + answer.stop - answer.start] == ids[answer.start :]
    assert len({tuple(document.ids) for document in found}) == 20
    assert make_questions(tokenizer, marks, position, 3, "a seed") == found[:3]


def test_records_speak_of_held_out_names_and_stories_do_not(tokenizer: Tokenizer) -> None:
    marks = find_special_tokens(tokenizer, EOS, 2048)
    held_out, train = (
        tokenizer.decode([token for d in make(tokenizer, marks, 1024, 4, "a seed") for token in d.ids])
        for make in (make_records, make_stories)
    )
    assert any(name in held_out for name in HELD_OUT_NAMES)
    assert not any(f" {name} " in train for name in HELD_OUT_NAMES)
    assert any(name in train for name in TRAINING_NAMES)


def test_new_phrasings_are_used_on_request(tokenizer: Tokenizer) -> None:
    marks = find_special_tokens(tokenizer, EOS, 2048)
    for new in (False, True):
        found = make_records(tokenizer, marks, 1024, 6, "a seed", new_phrasings=new)
        text = tokenizer.decode([token for d in found for token in d.ids])
        assert (" stores the " in text) is new
        assert (" keeps the " in text) is not new


@pytest.mark.parametrize("length", [3000, 6000])
def test_stories_stretch_records_that_are_too_short(tokenizer: Tokenizer, length: int) -> None:
    marks = find_special_tokens(tokenizer, EOS, 2048)
    records = make_records(tokenizer, marks, length, 20)
    assert {len(d.ids) for d in records} == {length + 1}
    distances = [answer.distance for d in records for answer in d.answers]
    assert len(distances) > 100
    assert sum(distance > length / 2 for distance in distances) > len(distances) / 20
    for ids, answers in records:
        for answer in answers:
            before = answer.start - answer.distance
            assert ids[before : before + answer.stop - answer.start] == ids[answer.start : answer.stop]


def test_texts_that_fill_no_document_are_reported() -> None:
    with pytest.raises(SettingsError, match="--length: the texts that come with kvmux do not fill 900,000 tokens"):
        make_stories(TINY, SpecialTokens((0,), 1), 900_000, 1)
    assert 1 <= len(make_stories(TINY, SpecialTokens((0,), 1), 20_000, 9)) < 9


def test_fewer_documents_are_the_first_of_more(tokenizer: Tokenizer) -> None:
    marks = find_special_tokens(tokenizer, EOS, 2048)
    for make in (make_records, partial(make_records, new_phrasings=True), make_stories):
        assert make(tokenizer, marks, 256, 2, "a") == make(tokenizer, marks, 256, 3, "a")[:2]
        assert make(tokenizer, marks, 256, 2, "b") != make(tokenizer, marks, 256, 2, "a")
