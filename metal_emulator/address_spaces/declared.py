"""Checks of declarations that Apple's compiler makes and C++ compilers do not: address spaces, static variables.

Works on tokens, as ../rules.py does; what needs types is checked by clang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from metal_emulator.address_spaces.diagnostics import Fault
from metal_emulator.syntax import Declaration, DeclarationKind, find_declarations
from metal_emulator.tokens import Source

# Attributes that are positions or sizes. In one kernel, those that are vectors must all have the same dimensions.
POSITIONS = frozenset(
    (
        "thread_position_in_grid",
        "thread_position_in_threadgroup",
        "threadgroup_position_in_grid",
        "threadgroups_per_grid",
        "threads_per_grid",
        "threads_per_threadgroup",
        "dispatch_threads_per_threadgroup",
    )
)
_MEMBER_ARRAY = (
    "a member array is not a pointer to thread from Metal 4.1 on, where `this` is generic: "
    "read into a local variable, and copy that"
)
_STATIC = "a static variable must be a constant: write static constant before its type"


def check(source: Source) -> Iterator[Fault]:
    """Yield the faults of all declarations of a source."""
    declarations = find_declarations(source)
    yield from _check_member_arrays(source, declarations)
    for each in declarations:
        if each.is_kernel(source):
            yield from _check_positions(source, each)
            yield from _check_buffers(source, each)
        yield from _check_statics(source, each)


def _check_positions(source: Source, kernel: Declaration) -> Iterator[Fault]:
    sizes = {
        token.text[-1]
        for begin, end in source.split_at_commas(*kernel.parameters)
        if any(source.tokens[first].text in POSITIONS for first, _, _, _ in source.find_attributes(begin, end))
        for token in source.tokens[begin:end]
        if token.text in ("uint2", "uint3", "ushort2", "ushort3")
    }
    if len(sizes) > 1:
        message = f"kernel '{kernel.name}' has positions of 2 and of 3 dimensions: give all of them the same"
        yield source.location(kernel.parameters[0]), message


def _check_buffers(source: Source, kernel: Declaration) -> Iterator[Fault]:
    for begin, end in source.split_at_commas(*kernel.parameters):
        texts = {token.text for token in source.tokens[begin:end]}
        if texts & {"*", "&"} and not texts & {"device", "constant"}:
            yield source.location(begin), f"'{source.slice(begin, end)}': a buffer lies in device or constant memory"


def _check_member_arrays(source: Source, declarations: Sequence[Declaration]) -> Iterator[Fault]:
    """Yield faults of member functions that use a member array as a pointer. They may use its elements."""
    arrays: dict[int | None, set[str]] = {}  # by struct
    for each in declarations:
        if each.kind is DeclarationKind.VARIABLE and each.is_member:
            names = {source.tokens[i].text for i in range(each.begin, each.end) if source.is_at(i + 1, "[")}
            arrays.setdefault(each.struct, set()).update(names - {"]"})
    for each in declarations:
        if each.kind is DeclarationKind.FUNCTION and each.is_member:
            for i in range(*each.body):
                text, before = source.tokens[i].text, source.tokens[i - 1].text
                is_own = before not in (".", "->") or source.is_at(i - 2, "this")
                if text in arrays.get(each.struct, ()) and is_own and not source.is_at(i + 1, "["):
                    yield source.location(i), f"'{text}': {_MEMBER_ARRAY}"


def _check_statics(source: Source, each: Declaration) -> Iterator[Fault]:
    """Yield faults of static variables: members of structs, and variables within functions."""
    begin, end = each.body if each.kind is DeclarationKind.FUNCTION else (each.begin, each.end)
    if each.kind is DeclarationKind.FUNCTION or (each.kind is DeclarationKind.VARIABLE and each.is_member):
        for i in range(begin, end):
            if source.tokens[i].text == "static" and "constant" not in (
                token.text for token in source.tokens[max(begin, i - 2) : i + 4]
            ):
                yield source.location(i), _STATIC
