"""Metal Shading Language to C++ with clang's address spaces: rewrites what its type checker would stumble over.

That is: threadgroup variables become references, instantiations lose their attributes, float4(...) and (device float*)p
become functions, structs get copies from every address space, 1.5h becomes half(1.5f). The rest stays as it is, line by
line. What the names mean is told by include/metal_stdlib.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kernels.metal.emulator.rules import SPACES
from kernels.metal.emulator.syntax import Declaration, DeclarationKind, declarations
from kernels.metal.emulator.tokens import Source
from kernels.metal.emulator.translation import threadgroup_variables

Edit = tuple[int, int, str]  # of the text: start, end, replacement

MAX_THREADGROUP_BYTES = 32768
_SCALARS = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float")
_VECTORS = frozenset(f"{scalar}{size}" for scalar in _SCALARS for size in (2, 3, 4))
_LITERAL = re.compile(r"(\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)(h|H|bf|BF)")
_PREFIXES = ("*", "&", "-", "+", "!", "~", "++", "--")
_SUFFIXES = {"h": "half", "bf": "bfloat"}


def rewritten(source: Source) -> str:
    """C++ for clang that needs include/metal_stdlib."""
    edits = [*_vectors(source), *_casts(source), *_literals(source), *_structs(source)]
    for each in declarations(source):
        if each.kind is DeclarationKind.INSTANTIATION:
            edits += _without_attributes(source, each)
        elif each.is_kernel(source):
            edits += _variables(source, each)
        if each.kind is DeclarationKind.FUNCTION and each.template:
            edits += _types(source, each)
    return _edited(source.text, edits)


def _variables(source: Source, kernel: Declaration) -> Iterator[Edit]:
    """Each `threadgroup float a[8], b;` as references, and an assertion that those so far have room."""
    names: list[str] = []
    for variable in threadgroup_variables(source, *kernel.body):
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
        if _depth(source, kernel.body[0], variable.begin):  # unknown where their block ends
            names = names[: -len(variable.declarators)]
        yield _replaced(source, variable.begin, variable.end, "".join(made))


def _depth(source: Source, begin: int, end: int) -> int:
    """Braces that are open at `end`."""
    texts = [token.text for token in source.tokens[begin:end]]
    return texts.count("{") - texts.count("}")


def _types(source: Source, function: Declaration) -> Iterator[Edit]:
    """An assertion for each type parameter. `thread T*` is `T*` here, and would find a T in any address space."""
    last = source.close_angle(function.begin + 1)
    at = source.tokens[function.body[0] - 1].end
    for begin, end in source.split(function.begin + 2, last):
        if source.tokens[begin].text in ("class", "typename") and begin + 1 < end and source.tokens[begin + 1].is_word:
            name = source.tokens[begin + 1].text
            told = f"'{name}' cannot be a type with an address space: does the argument lie in thread memory?"
            yield at, at, f' static_assert(::metal::spaces::is_thread<{name}>::value, "{told}");'


def _without_attributes(source: Source, each: Declaration) -> Iterator[Edit]:
    for begin, end in {(begin, end) for _, _, begin, end in source.attributes(each.begin, each.end)}:
        yield _replaced(source, begin, end, "")


def _vectors(source: Source) -> Iterator[Edit]:
    """`float4(` and `vec<T, 4>(`, and of names that a typedef or using gave to them."""
    names = _VECTORS | set(_aliases(source))
    for i, token in enumerate(source.tokens):
        last = i
        if token.text == "vec" and source.is_at(i + 1, "<"):
            last = source.close_angle(i + 1)
        elif token.text not in names:
            continue
        if source.is_at(last + 1, "(") and source.tokens[i - 1].text != "operator":
            yield _replaced(source, i, last + 1, f"::metal::spaces::make<{source.slice(i, last + 1)}>")


def _aliases(source: Source) -> Iterator[str]:
    """Of `typedef half4 H;` and `using H = vec<half, 4>;`."""
    for i, token in enumerate(source.tokens):
        if token.text == "typedef" and (end := _vector_end(source, i + 1)) and source.is_at(end + 1, ";"):
            yield source.tokens[end].text
        elif token.text == "using" and source.is_at(i + 2, "=") and _vector_end(source, i + 3):
            yield source.tokens[i + 1].text


def _vector_end(source: Source, i: int) -> int | None:
    """After the type of a vector that stands there."""
    while source.tokens[i].text in ("metal", "::"):
        i += 1
    if source.is_at(i, "vec", "<"):
        return source.close_angle(i + 1) + 1
    return i + 1 if source.tokens[i].text in _VECTORS else None


def _casts(source: Source) -> Iterator[Edit]:
    """`(device float*)p`, which may change the address space in C++ and not in Metal."""
    for i, token in enumerate(source.tokens):
        if token.text != "(" or (source.tokens[i - 1].is_word and source.tokens[i - 1].text != "return"):
            continue
        last = source.close(i)
        if source.tokens[last - 1].text != "*" or not SPACES & {each.text for each in source.tokens[i + 1 : last]}:
            continue
        yield _replaced(source, i, last + 1, f"::metal::spaces::cast<{source.slice(i + 1, last)}>(")
        after = source.tokens[_operand_end(source, last + 1) - 1].end
        yield after, after, ")"


def _operand_end(source: Source, i: int) -> int:
    """After the operand of a cast that begins there: a name or something in brackets, what is before and behind it."""
    while (text := source.tokens[i].text) in _PREFIXES or (text == "(" and _is_cast(source, i)):
        i = source.close(i) + 1 if text == "(" else i + 1
    i = source.close(i) + 1 if text == "(" else i + 1
    while (text := source.tokens[i].text) in ("(", "[", ".", "->", "::"):
        i = source.close(i) + 1 if text in ("(", "[") else i + 2
    return i


def _is_cast(source: Source, i: int) -> bool:
    last = source.close(i)
    return source.tokens[last - 1].text == "*" or source.tokens[last + 1].is_word


def _literals(source: Source) -> Iterator[Edit]:
    for i, token in enumerate(source.tokens):
        if found := _LITERAL.fullmatch(token.text):
            yield _replaced(source, i, i + 1, f"{_SUFFIXES[found[2].lower()]}({found[1]}f)")


def _structs(source: Source) -> Iterator[Edit]:
    """What C++ leaves out after the { of each struct that has a name."""
    for i, token in enumerate(source.tokens):
        if token.text not in ("struct", "class") or source.tokens[i - 1].text in ("<", ",", "enum"):
            continue
        opening = i + 1
        while opening < len(source.tokens) and source.tokens[opening].text not in ("{", ";", "(", ")", "=", "*", "&"):
            opening += 1
        if not source.is_at(opening, "{") or opening == i + 1:
            continue
        name = source.tokens[i + 1].text
        made = "" if _has_constructor(source, name, opening) else f"{name}() = default;"
        private = " private:" if token.text == "class" else ""
        at = source.tokens[opening].end
        yield at, at, f" public: SPACES_STRUCT({name}, {made}){private}"


def _has_constructor(source: Source, name: str, opening: int) -> bool:
    inside = range(opening + 1, source.close(opening))
    return any(
        source.is_at(i, name, "(") and source.tokens[i - 1].text in ("{", "}", ";", ":", "constexpr", "explicit", ">")
        for i in inside
    )


def _replaced(source: Source, begin: int, end: int, text: str) -> Edit:
    """Tokens [begin, end); as many lines as before."""
    start, stop = source.tokens[begin].start, source.tokens[end - 1].end
    return start, stop, text + "\n" * (source.text.count("\n", start, stop) - text.count("\n"))


def _edited(text: str, edits: list[Edit]) -> str:
    parts, done = [], 0
    for start, stop, replacement in sorted(edits):
        if start < done:
            continue  # within something that has been replaced
        parts += [text[done:start], replacement]
        done = stop
    return "".join([*parts, text[done:]])
