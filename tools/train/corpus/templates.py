"""Expands sentence templates: `[this|that]` is a choice (may nest), `$name` a slot; corrects a/an and capitals."""

import re
from collections.abc import Mapping
from random import Random

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\$(\w+)")
_ARTICLE = re.compile(r"\b([Aa])n? (?=([a-zA-Z]+))")
_SENTENCE_START = re.compile(r'((?:[.!?]|\.") )([a-z])')
_VOWEL_SOUND = re.compile(r"(?!one\b|once\b|use|uni|eu)[aeiou]|hour|honest", re.IGNORECASE)


def article_for(word: str) -> str:
    return "an" if _VOWEL_SOUND.match(word) else "a"


def _mend_article(match: re.Match[str]) -> str:
    article = article_for(match.group(2))
    return (article.capitalize() if match.group(1) == "A" else article) + " "


def choose(rng: Random, template: str) -> str:
    """Return the template with a random option for each choice `[a|b]`, inner choices first."""
    while match := _CHOICE.search(template):
        option = rng.choice(match.group(1).split("|"))
        template = template[: match.start()] + option + template[match.end() :]
    return template


def fill(template: str, slots: Mapping[str, str]) -> str:
    """Return the template with its slots filled, and with articles and capitals corrected."""
    text = _SLOT.sub(lambda match: slots[match.group(1)], template)
    text = _ARTICLE.sub(_mend_article, text)
    text = _SENTENCE_START.sub(lambda match: match.group(1) + match.group(2).upper(), text)
    first = 1 if text.startswith('"') else 0
    return text[:first] + text[first : first + 1].upper() + text[first + 1 :]


def expand(rng: Random, template: str, slots: Mapping[str, str]) -> str:
    return fill(choose(rng, template), slots)
