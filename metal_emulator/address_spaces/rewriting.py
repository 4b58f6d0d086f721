"""Translates Metal to C++ with clang's address spaces: rewrites what clang's type checker would refuse.

Threadgroup variables become references, instantiations lose their attributes, float4(...) and (device float*)p become
functions, structs get copies from every address space, 1.5h becomes half(1.5f). The rest stays as it is, line by line.
include/metal_stdlib defines the names that are inserted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from metal_emulator.rules import ADDRESS_SPACES
from metal_emulator.syntax import Declaration, DeclarationKind, find_declarations
from metal_emulator.tokens import Source
from metal_emulator.translation import find_threadgroup_variables

Edit = tuple[int, int, str]  # a replacement in a text: (start, end, new text)

MAX_THREADGROUP_BYTES = 32768
_SCALARS = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float")
_VECTORS = frozenset(f"{scalar}{size}" for scalar in _SCALARS for size in (2, 3, 4))
_LITERAL = re.compile(r"(\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)(h|H|bf|BF)")
_PREFIXES = ("*", "&", "-", "+", "!", "~", "++", "--")
_SUFFIXES = {"h": "half", "bf": "bfloat"}


def rewrite(source: Source) -> str:
    """Return a Metal source as C++ for clang, which must include include/metal_stdlib first."""
    edits = [*_rewrite_vectors(source), *_rewrite_casts(source), *_rewrite_literals(source), *_rewrite_structs(source)]
    for each in find_declarations(source):
        if each.kind is DeclarationKind.INSTANTIATION:
            edits += _remove_attributes(source, each)
        elif each.is_kernel(source):
            edits += _rewrite_variables(source, each)
        if each.kind is DeclarationKind.FUNCTION and each.is_template:
            edits += _assert_type_parameters(source, each)
    return _apply_edits(source.text, edits)


def _rewrite_variables(source: Source, kernel: Declaration) -> Iterator[Edit]:
    """Turn each `threadgroup float a[8], b;` into references, and add a static_assert that all so far fit in memory."""
    names: list[str] = []
    for variable in find_threadgroup_variables(source, *kernel.body):
        made = []
        for name, end in variable.declarators:
            names.append(source.tokens[name].text)
            type_name = f"spaces_{names[-1]}"
            made.append(
                f"typedef {source.slice(*variable.type)} {type_name}{source.slice(name + 1, end)}; "
                f"threadgroup {type_name}& {names[-1]} = ::metal::spaces::variable<{type_name}>(); "
            )
        bytes_so_far = " + ".join(f"sizeof({name})" for name in names)
        made.append(
            f"static_assert({bytes_so_far} <= {MAX_THREADGROUP_BYTES}, "
            f'"Metal has {MAX_THREADGROUP_BYTES} bytes of threadgroup memory"); '
        )
        # Later assertions do not count a variable of an inner block, as the end of its block is not known here.
        if _count_open_braces(source, kernel.body[0], variable.begin):
            names = names[: -len(variable.declarators)]
        yield _make_edit(source, variable.begin, variable.end, "".join(made))


def _count_open_braces(source: Source, begin: int, end: int) -> int:
    """Return how many of the braces opened among the tokens [begin, end) are still open at `end`."""
    texts = [token.text for token in source.tokens[begin:end]]
    return texts.count("{") - texts.count("}")


def _assert_type_parameters(source: Source, function: Declaration) -> Iterator[Edit]:
    """Assert that no template type has an address space: in C++ `thread T*` is `T*`, and would match any pointer."""
    last = source.find_closing_angle(function.begin + 1)
    at = source.tokens[function.body[0] - 1].end
    for begin, end in source.split_at_commas(function.begin + 2, last):
        if source.tokens[begin].text in ("class", "typename") and begin + 1 < end and source.tokens[begin + 1].is_word:
            name = source.tokens[begin + 1].text
            message = f"'{name}' cannot be a type with an address space: does the argument lie in thread memory?"
            yield at, at, f' static_assert(::metal::spaces::is_thread<{name}>::value, "{message}");'


def _remove_attributes(source: Source, each: Declaration) -> Iterator[Edit]:
    for begin, end in {(begin, end) for _, _, begin, end in source.find_attributes(each.begin, each.end)}:
        yield _make_edit(source, begin, end, "")


def _rewrite_vectors(source: Source) -> Iterator[Edit]:
    """Turn `float4(...)` and `vec<T, 4>(...)`, also by names from a typedef or using, into function calls."""
    names = _VECTORS | set(_find_vector_aliases(source))
    for i, token in enumerate(source.tokens):
        last = i
        if token.text == "vec" and source.is_at(i + 1, "<"):
            last = source.find_closing_angle(i + 1)
        elif token.text not in names:
            continue
        if source.is_at(last + 1, "(") and source.tokens[i - 1].text != "operator":
            yield _make_edit(source, i, last + 1, f"::metal::spaces::make<{source.slice(i, last + 1)}>")


def _find_vector_aliases(source: Source) -> Iterator[str]:
    """Yield the names of vector types: H of `typedef half4 H;` and `using H = vec<half, 4>;`."""
    for i, token in enumerate(source.tokens):
        if token.text == "typedef" and (end := _vector_end(source, i + 1)) and source.is_at(end + 1, ";"):
            yield source.tokens[end].text
        elif token.text == "using" and source.is_at(i + 2, "=") and _vector_end(source, i + 3):
            yield source.tokens[i + 1].text


def _vector_end(source: Source, i: int) -> int | None:
    """Return the index after the vector type that begins at token i; None if none begins there."""
    while source.tokens[i].text in ("metal", "::"):
        i += 1
    if source.is_at(i, "vec", "<"):
        return source.find_closing_angle(i + 1) + 1
    return i + 1 if source.tokens[i].text in _VECTORS else None


def _rewrite_casts(source: Source) -> Iterator[Edit]:
    """Turn casts such as `(device float*)p`, which in Metal cannot change the address space, into function calls."""
    for i, token in enumerate(source.tokens):
        if token.text != "(" or (source.tokens[i - 1].is_word and source.tokens[i - 1].text != "return"):
            continue
        last = source.find_closing(i)
        if source.tokens[last - 1].text != "*" or not ADDRESS_SPACES & {
            each.text for each in source.tokens[i + 1 : last]
        }:
            continue
        yield _make_edit(source, i, last + 1, f"::metal::spaces::cast<{source.slice(i + 1, last)}>(")
        after = source.tokens[_operand_end(source, last + 1) - 1].end
        yield after, after, ")"


def _operand_end(source: Source, i: int) -> int:
    """Return the index after the operand of a cast at token i: a name or brackets, with prefixes and suffixes."""
    while (text := source.tokens[i].text) in _PREFIXES or (text == "(" and _is_cast(source, i)):
        i = source.find_closing(i) + 1 if text == "(" else i + 1
    i = source.find_closing(i) + 1 if text == "(" else i + 1
    while (text := source.tokens[i].text) in ("(", "[", ".", "->", "::"):
        i = source.find_closing(i) + 1 if text in ("(", "[") else i + 2
    return i


def _is_cast(source: Source, i: int) -> bool:
    last = source.find_closing(i)
    return source.tokens[last - 1].text == "*" or source.tokens[last + 1].is_word


def _rewrite_literals(source: Source) -> Iterator[Edit]:
    for i, token in enumerate(source.tokens):
        if found := _LITERAL.fullmatch(token.text):
            yield _make_edit(source, i, i + 1, f"{_SUFFIXES[found[2].lower()]}({found[1]}f)")


def _rewrite_structs(source: Source) -> Iterator[Edit]:
    """Insert into each named struct, after its {, the constructors and assignments that Metal has and C++ lacks."""
    for i, token in enumerate(source.tokens):
        if token.text not in ("struct", "class") or source.tokens[i - 1].text in ("<", ",", "enum"):
            continue
        opening = i + 1
        while opening < len(source.tokens) and source.tokens[opening].text not in ("{", ";", "(", ")", "=", "*", "&"):
            opening += 1
        if not source.is_at(opening, "{") or opening == i + 1:
            continue
        name = source.tokens[i + 1].text
        default_constructor = "" if _has_constructor(source, name, opening) else f"{name}() = default;"
        private = " private:" if token.text == "class" else ""
        at = source.tokens[opening].end
        yield at, at, f" public: SPACES_STRUCT({name}, {default_constructor}){private}"


def _has_constructor(source: Source, name: str, opening: int) -> bool:
    inside = range(opening + 1, source.find_closing(opening))
    return any(
        source.is_at(i, name, "(") and source.tokens[i - 1].text in ("{", "}", ";", ":", "constexpr", "explicit", ">")
        for i in inside
    )


def _make_edit(source: Source, begin: int, end: int, text: str) -> Edit:
    """Return an edit that replaces tokens [begin, end) by `text`, with newlines added to keep the number of lines."""
    start, stop = source.tokens[begin].start, source.tokens[end - 1].end
    return start, stop, text + "\n" * (source.text.count("\n", start, stop) - text.count("\n"))


def _apply_edits(text: str, edits: list[Edit]) -> str:
    parts, done = [], 0
    for start, stop, replacement in sorted(edits):
        if start < done:
            continue  # skip an edit of text that an earlier edit replaced
        parts += [text[done:start], replacement]
        done = stop
    return "".join([*parts, text[done:]])
