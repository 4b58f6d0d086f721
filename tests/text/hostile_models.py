"""Tokenizers and chat templates made to crash, hang or exhaust memory."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from tests.text.tiny_tokenizers import byte_level

TEMPLATES = {  # each is harmless without its variable
    "a power": "{{ (n + 9) ** (10 ** 8) }}",
    "a long text": "{{ 'a' * (n * 10) ** 10 }}",
    "a text doubled": "{% set s = namespace(s='a') %}{% for i in range(n * 60) %}{% set s.s = s.s + s.s %}{% endfor %}",
    "nested loops": "{% for a in range(n * 99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that are long": "{% for a in range(n * 99999) %}{% set s = range(99999) | list | length %}{% endfor %}",
    "lists in lists": "{% set s = namespace(s=[1]) %}{% for i in range(n * 60) %}{% set s.s = s.s + s.s %}{% endfor %}",
    "a wide number": "{{ '%*d' | format(10 ** 10 * n, 5) }}",
    "a filter": "{{ 'x' | center(10 ** 10 * n) }}",
}
COMPILED = "{{ 10 ** (10 ** 8) }}"  # by jinja itself, before anything is rendered


def save_with_template(directory: Path, template: str) -> Path:
    return save_tokenizer(directory, byte_level(), "{% if n %}" + template + "{% endif %}{{ messages[0].content }}")


def save_tokenizer(directory: Path, backend: tokenizers.Tokenizer, template: str = "{{ messages[0].content }}") -> Path:
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)
    return directory


def panicking_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer that panics at many letters a: Oniguruma gives up, which its wrapper takes for impossible."""
    return _split_by("(a+)+$")


def growing_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer that makes ten letters q ten billion."""
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.Replace("q", "q" * 1000) for _ in range(3)])
    return backend


def slow_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer whose time grows with the square of the text, each step within the library's own limits."""
    return _split_by("(?:a|e)*[^ae]{2}")


def _split_by(pattern: str) -> tokenizers.Tokenizer:
    """Return the byte-level tokenizer, which first splits a text by a regular expression."""
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend
