"""Finds the swizzles (such as `v.xy`) of a Metal source, and rewrites them in C++.

`.xy` is a swizzle unless a struct of the source has a member of that name and the object is declared as such a struct.
Types are not known here, so the nearest declaration of the object's name is looked at. On the left of an assignment a
swizzle becomes a reference to components; elsewhere a constant, which the C++ compiler keeps from being assigned to.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from metal_emulator.tokens import Source

_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{2,4}")
_COMPONENTS = {"x": 0, "y": 1, "z": 2, "w": 3, "r": 0, "g": 1, "b": 2, "a": 3}
_ASSIGNMENTS = (("=",), *((f"{op}=",) for op in "+-*/%&|^"), ("<", "<="), (">", ">", "="), ("++",), ("--",))
_VECTOR = re.compile(r"[a-z_]+[234]|vec|packed_vec")
_OPENING = {")": "(", "]": "["}
# words and operators that may stand between a type and a name
_QUALIFIERS = ("*", "&", "const", "volatile", "device", "constant", "threadgroup", "thread")

Members = Mapping[str, set[str]]  # by the name of a member: the structs that have such a member


def find_swizzles(source: Source) -> Iterator[tuple[int, str]]:
    """Yield (index of its token, C++ that replaces it) for each swizzle.

    Raises SyntaxError if a swizzle on the left of an assignment names a component twice, or only a part is assigned.
    """
    members = _find_swizzle_members(source)
    for i in range(2, len(source.tokens) - 1):
        text = source.tokens[i].text
        if source.tokens[i - 1].text not in (".", "->") or not _SWIZZLE.fullmatch(text):
            continue
        if source.is_at(i + 1, "(") or (text in members and _is_member(source, i, members[text])):
            continue
        assigned = _is_assigned(source, i + 1)
        if not assigned and _is_assigned(source, _skip_selectors(source, i + 1)):
            raise SyntaxError(
                f"{source.location(i)}: a part of '.{text}' is assigned, which is a copy: "
                "assign to the components of the vector itself"
            )
        if assigned and len(set(text)) < len(text):
            raise SyntaxError(
                f"{source.location(i)}: '{text}' is assigned, and names a component twice: name each once"
            )
        components = ", ".join(str(_COMPONENTS[letter]) for letter in text)
        yield i, f"template {'swizzled_to' if assigned else 'swizzled'}<{components}>()"


def _is_assigned(source: Source, after: int) -> bool:
    return any(source.is_at(after, *each) for each in _ASSIGNMENTS)


def _skip_selectors(source: Source, i: int) -> int:
    """Return the index after all selectors such as `[1]` and `.x` that stand from token i on."""
    while source.is_at(i, "[") or source.is_at(i, "."):
        i = source.find_closing(i) + 1 if source.is_at(i, "[") else i + 2
    return i


def _find_swizzle_members(source: Source) -> Members:
    """Return the members of structs whose names look like swizzles, and the structs that have them."""
    found = defaultdict(set)
    for i in range(len(source.tokens) - 2):
        if source.tokens[i].text in ("struct", "class", "union") and source.is_at(i + 2, "{"):
            for member in range(i + 3, source.find_closing(i + 2)):
                before, name = source.tokens[member - 1], source.tokens[member].text
                if _SWIZZLE.fullmatch(name) and (before.is_word or before.text in (",", ">", "*", "&")):
                    found[name].add(source.tokens[i + 1].text)
    return found


def _is_member(source: Source, at: int, structs: set[str]) -> bool:
    """Return whether the object whose member is token `at` is declared as one of these structs."""
    name = _find_object_name(source, at - 2)
    if name == "this":
        return True
    for i in range(at - 3, 0, -1):
        if source.tokens[i].text == name:
            declared = _find_declared_type(source, i)
            if declared in structs or _VECTOR.fullmatch(declared):
                return declared in structs
    return False


def _find_object_name(source: Source, last: int) -> str:
    """Return the object's name s in `s.`, `s[i].`, `s(...).`, `a.s.` and `(*s).`, of which token `last` is the end."""
    while closing := _OPENING.get(source.tokens[last].text):
        opening = _find_opening(source, last, closing)
        within = closing == "(" and not source.tokens[opening - 1].is_word
        last = last - 1 if within else opening - 1
    return source.tokens[last].text


def _find_opening(source: Source, index: int, opening: str) -> int:
    """Return the index of the opening bracket that the bracket at `index` closes; 0 if there is none."""
    closing, depth = source.tokens[index].text, 0
    for i in range(index, 0, -1):
        depth += (source.tokens[i].text == closing) - (source.tokens[i].text == opening)
        if not depth:
            return i
    return 0


def _find_declared_type(source: Source, name: int) -> str:
    """Return the type T that precedes a name, as in `T* name` and `T<A> name`; if no type does, the word that does."""
    i = name - 1
    while i > 0 and source.tokens[i].text in _QUALIFIERS:
        i -= 1
    if source.tokens[i].text == ">":
        depth = 1
        while depth and i > 1:
            i -= 1
            depth += (source.tokens[i].text == ">") - (source.tokens[i].text == "<")
        i -= 1
    return source.tokens[i].text
