"""Special tokens that users type: with `split_special_tokens` they are texts, by any tokenizer and template."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import tokenizers

from config.errors import SettingsError
from server.text.chat.template import ChatTemplate
from server.text.encoder import Encoder
from server.text.errors import TextTooLong
from server.text.processes.messages import ChatDefaults, EncodeChat
from tests.text.tiny_tokenizers import BOS, EOS, KINDS, byte_level

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}{{ m.name }}</s>{% endfor %}"
PIECES = ["hello", " ", "w", "<s>", "</s>", "<", "s>", "</", "</s", "<s></s>", "\u2603", "\n", "<<s>>"]


@cache
def write_tokenizer(kind: str) -> str:
    return KINDS[kind]().to_str()


def make(kind: str, template: str = TEMPLATE, **defaults: Any) -> Encoder:
    backend = tokenizers.Tokenizer.from_str(write_tokenizer(kind))
    return Encoder(backend, ChatTemplate({"default": template}, {}), ChatDefaults(**defaults))


def encode(encoder: Encoder, *contents: Any, **options: Any) -> tuple[list[int], str]:
    messages = [{"role": "user", "content": content} for content in contents]
    found = encoder.answer(EncodeChat(messages, options.pop("max_length", 10_000), **options))
    return found.ids, found.text


@pytest.mark.parametrize("kind", KINDS)
def test_messages_have_no_special_tokens(kind: str, rng: random.Random) -> None:
    splitting, usual = make(kind, split_special_tokens=True), make(kind)
    for _ in range(30):
        contents = ["".join(rng.choices(PIECES, k=rng.randrange(8))) for _ in range(rng.randrange(1, 4))]
        ids, text = encode(splitting, *contents)
        assert text == encode(usual, *contents)[1]
        assert (ids.count(BOS), ids.count(EOS)) == (len(contents), len(contents))
        if kind == "byte_level":  # the others normalize what they read
            assert splitting.vocabulary.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", KINDS)
def test_texts_without_special_tokens_are_encoded_as_ever(kind: str, rng: random.Random) -> None:
    splitting, usual = make(kind, split_special_tokens=True), make(kind)
    content = "".join(rng.choices("hels w<>/\n", k=50)).replace("<s>", "").replace("</s>", "")
    for special in (False, True):
        assert encode(splitting, content, add_special_tokens=special) == encode(
            usual, content, add_special_tokens=special
        )


def test_by_default_they_are_special_tokens() -> None:
    ids, _ = encode(make("byte_level"), "a</s>b")
    assert ids.count(EOS) == 2


def test_special_tokens_around_the_whole_prompt() -> None:
    encoder = make("byte_level", split_special_tokens=True)
    assert encode(encoder, "a</s>b", add_special_tokens=True)[0] == [BOS, *encode(encoder, "a</s>b")[0]]


def test_whatever_a_request_says_is_text() -> None:
    encoder = make("byte_level", "{{ messages }}{{ tools }}{{ documents }}{{ x }}</s>", split_special_tokens=True)
    message = {
        "role": "user",
        "name": "</s>",
        "content": [{"type": "text", "text": "</s>"}],
        "x": {"</s>": ["</s>", 1]},
    }
    tools = [{"function": {"description": "</s>"}}]
    documents = [{"text": "</s>"}]
    found = encoder.answer(EncodeChat([message], 10_000, tools=tools, documents=documents, variables={"x": "</s>"}))
    assert found.ids.count(EOS) == 1
    assert found.text.count("</s>") == 8


@pytest.mark.parametrize("parts", [["a</", "s>b"], ["<", "/", "s>"], ["</s", "></s>"], ["<s", ">", "</s>"]])
def test_parts_that_a_template_joins_make_no_special_token(parts: list[str]) -> None:
    joined = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    splitting, usual = make("byte_level", joined, split_special_tokens=True), make("byte_level", joined)
    content = [{"type": "text", "text": part} for part in parts]
    ids, text = encode(splitting, content)
    assert text == "".join(parts)
    assert not {BOS, EOS} & {*ids}
    assert {BOS, EOS} & {*encode(usual, content)[0]}


def test_a_continued_message_and_the_limit_of_characters_are_those_of_the_text() -> None:
    encoder = make("byte_level", split_special_tokens=True)
    ids, text = encode(encoder, "a</s>", add_generation_prompt=False, continue_final_message=True)
    assert text == "<s>user:a</s>"
    assert ids.count(EOS) == 0
    assert encode(encoder, "</s>" * 5, max_length=len("<s>user:</s>") + 20)[0].count(EOS) == 1
    with pytest.raises(TextTooLong):
        encode(encoder, "</s>" * 5, max_length=1)


def test_a_tokenizer_without_special_tokens() -> None:
    backend = byte_level()
    encoder = Encoder(backend.from_str(backend.to_str().replace('"special":true', '"special":false')))
    assert encoder.vocabulary_data.special_ids == []
    plain = Encoder(encoder.backend, ChatTemplate({"default": TEMPLATE}, {}), ChatDefaults(split_special_tokens=True))
    assert encode(plain, "a</s>")[1] == "<s>user:a</s></s>"


def test_default_variables_of_the_template() -> None:
    encoder = make("byte_level", "{{ a }}{{ b }}", default_chat_template_kwargs={"a": "he", "b": "lo"})
    assert encode(encoder, "")[1] == "helo"
    assert encode(encoder, "", variables={"b": "ll"})[1] == "hell"
    with pytest.raises(SettingsError, match="default_chat_template_kwargs: messages, tools cannot be"):
        make("byte_level", default_chat_template_kwargs={"tools": [], "messages": [], "x": 1})
