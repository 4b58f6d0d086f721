"""What Apple's compiler asks of declarations and no C++ compiler does: where parameters and static variables lie.

Reads tokens, as ../rules.py does; what needs types is clang's.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.metal.emulator.address_spaces.diagnostics import Fault
from kernels.metal.emulator.syntax import Declaration, DeclarationKind, declarations
from kernels.metal.emulator.tokens import Source

POSITIONS = frozenset(  # and sizes; those that are vectors have the same number of dimensions in a kernel
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
_STATIC = "a static variable must be a constant: write static constant before its type"


def check(source: Source) -> Iterator[Fault]:
    for each in declarations(source):
        if each.is_kernel(source):
            yield from _positions(source, each)
            yield from _buffers(source, each)
        yield from _statics(source, each)


def _positions(source: Source, kernel: Declaration) -> Iterator[Fault]:
    sizes = {
        token.text[-1]
        for begin, end in source.split(*kernel.parameters)
        if any(source.tokens[first].text in POSITIONS for first, _, _, _ in source.attributes(begin, end))
        for token in source.tokens[begin:end]
        if token.text in ("uint2", "uint3", "ushort2", "ushort3")
    }
    if len(sizes) > 1:
        told = f"kernel '{kernel.name}' has positions of 2 and of 3 dimensions: give all of them the same"
        yield source.where(kernel.parameters[0]), told


def _buffers(source: Source, kernel: Declaration) -> Iterator[Fault]:
    for begin, end in source.split(*kernel.parameters):
        texts = {token.text for token in source.tokens[begin:end]}
        if texts & {"*", "&"} and not texts & {"device", "constant"}:
            yield source.where(begin), f"'{source.slice(begin, end)}': a buffer lies in device or constant memory"


def _statics(source: Source, each: Declaration) -> Iterator[Fault]:
    """Members of structs, and variables within functions."""
    begin, end = each.body if each.kind is DeclarationKind.FUNCTION else (each.begin, each.end)
    if each.kind is DeclarationKind.FUNCTION or (each.kind is DeclarationKind.VARIABLE and each.member):
        for i in range(begin, end):
            if source.tokens[i].text == "static" and "constant" not in (
                token.text for token in source.tokens[max(begin, i - 2) : i + 4]
            ):
                yield source.where(i), _STATIC
