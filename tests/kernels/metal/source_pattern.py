"""Changes one place of a Metal source, found by a pattern of tokens that does not depend on names of variables.

In `$i «<→<=» $width` the part between « and → is replaced by the part between → and ». `$name` matches any word, the
same word at each occurrence. The part before ` ... ` is context, which binds names; any code may come between it and
the rest. So a pattern still matches after variables or fields were renamed, lines laid out differently or comments
changed, but not after an expression was changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from metal_emulator.tokens import Source, Token

Names = Mapping[str, str]  # the word that each name stands for

_CHANGE = re.compile("«([^»]*?)→([^»]*)»")


def change_once(text: str, within: str, change: str) -> str:
    """Return the source with the change made in the only place that matches.

    `within`: the names of the functions and structs to search, in the order of the source.
    """
    source = Source(text)
    places = [i for name in within.split() for first, end in scopes(source, name) for i in range(first, end)]
    *context, changed = change.split(" ... ")
    pieces, by = [*context, _CHANGE.sub(r"\1", changed)], _CHANGE.sub(r"\2", changed)
    results = {
        text[: source.tokens[first].start] + _filled(by, names) + text[source.tokens[end - 1].end :]
        for first, end, names in _matches(source, places, pieces, {})
    }
    assert len(results) == 1, f"{within!r} has {len(results)} places for the change {change!r}"
    return results.pop()


def scopes(source: Source, name: str) -> Iterator[tuple[int, int]]:
    """Yield the tokens [begin, end) of each function or struct of that name, from the name to its closing bracket."""
    for i, token in enumerate(source.tokens):
        if token.text == name:
            body = i + 1
            if source.is_at(body, "("):
                body = source.find_closing(body) + 1
                body += source.is_at(body, "const")
            if source.is_at(body, "{"):
                yield i, source.find_closing(body) + 1


def _matches(
    source: Source, places: Sequence[int], pieces: Sequence[str], known: Names
) -> Iterator[tuple[int, int, Names]]:
    """Yield the tokens [begin, end) of the last piece, and all names, for every way to find the pieces in order."""
    wanted = _tokens(pieces[0])
    for i, first in enumerate(places[: len(places) - len(wanted) + 1]):
        names = _match(source.tokens[first : first + len(wanted)], wanted, known)
        if names is not None:
            if len(pieces) == 1:
                yield first, first + len(wanted), names
            else:
                yield from _matches(source, places[i + len(wanted) :], pieces[1:], names)


def _match(tokens: Sequence[Token], wanted: Sequence[str], known: Names) -> Names | None:
    """Return the names including those that this piece binds; None if it does not match."""
    names = dict(known)
    for token, text in zip(tokens, wanted, strict=True):
        if text[0] != "$":
            if token.text != text:
                return None
        elif not token.is_word or names.setdefault(text[1:], token.text) != token.text:
            return None
    return names


def _tokens(pattern: str) -> list[str]:
    """Return the texts of a piece's tokens, `$` and its name as one."""
    texts = [token.text for token in Source(pattern.replace("$", " $ ")).tokens]
    joined = [f"${text}" if before == "$" else text for before, text in zip(["", *texts], texts, strict=False)]
    return [text for text in joined if text != "$"]


def _filled(by: str, names: Names) -> str:
    return re.sub(r"\$(\w+)", lambda found: names[found[1]], by)
