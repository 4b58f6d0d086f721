"""Stop strings against their definition, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.output import StopStrings, _Search

AB = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def definition(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: stop as soon as the text ends with a stop string, and take the longest off."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


@settings(deadline=None)
@given(pieces=st.lists(AB, max_size=8), stops=STOPS)
def test_text_ends_before_the_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    text = "".join([matcher.push(piece) for piece in pieces])
    found = matcher.matched_stop is not None
    assert (text + matcher.flush(), found) == definition("".join(pieces), stops)


@settings(deadline=None)
@given(pieces=st.lists(AB, max_size=8), stops=STOPS)
def test_what_is_out_is_never_taken_back(pieces: list[str], stops: list[str]) -> None:
    """After every piece: what is out is a beginning of the end result, whichever way the text goes on."""
    matcher, shown, seen = StopStrings(stops), "", ""
    for piece in pieces:
        shown, seen = shown + matcher.push(piece), seen + piece
        for rest in ("", *stops, *(stop[1:] for stop in stops)):
            assert definition(seen + rest, stops)[0].startswith(shown)


@settings(deadline=None)
@given(pieces=st.lists(AB, max_size=8), stops=STOPS)
def test_no_more_is_held_back_than_needed(pieces: list[str], stops: list[str]) -> None:
    matcher, seen, shown = StopStrings(stops), "", ""
    for piece in pieces:
        seen, shown = seen + piece, shown + matcher.push(piece)
        held = seen[len(shown) :]
        assert matcher.matched_stop or not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["Hello wor", "ld\nUser: ", "hi"], ["\nUser:"], "Hello world"),
        (["a\n", "\nb"], ["\n\n"], "a"),
        (["one STOPtwo END"], ["END", "STOP"], "one "),
        (["xEN", "x"], ["END"], "xENx"),
        (["xEN"], ["END"], "xEN"),
        (["abc"], ["c", "abc"], ""),
        (["aab"], ["ab"], "a"),
        (["text"], [], "text"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], text: str) -> None:
    matcher = StopStrings(stops)
    assert "".join([*map(matcher.push, pieces), matcher.flush()]) == text


def test_a_character_costs_the_same_however_much_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of stop strings that a text nearly has again and again."""
    steps, border = [0], _Search._border

    def counted(search: _Search, length: int) -> int:
        steps[0] += 1
        return border(search, length)

    monkeypatch.setattr(_Search, "_border", counted)
    stops = ["a" * length + "b" for length in range(960, 1023)]
    matcher = StopStrings(stops)
    text = "".join(map(matcher.push, ["a" * 3] * 2000))
    assert len(text) == 6000 - 1022
    assert steps[0] <= len(stops) * (6000 + 1023)
    assert matcher.push("b") == ""
    assert matcher.matched_stop == stops[-1]
