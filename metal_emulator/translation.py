"""Translates Metal Shading Language to C++: finds the kernels, and rewrites the little that C++ does not have.

Attributes are removed, a threadgroup's variables become references into memory of the runtime, swizzles become calls,
1.5h becomes half(1.5f), barriers and simd operations get the place of their call as an argument, and every kernel gets
an entry point that takes its arguments out of a launch. All else stays as it is, line by line. Does not know what
include/metal_stdlib defines, nor how a kernel runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from metal_emulator.swizzles import find_swizzles
from metal_emulator.syntax import Declaration, DeclarationKind, find_declarations
from metal_emulator.tokens import Source

MAX_BUFFERS, MAX_THREADS, MAX_VARIABLES = 31, 1024, 64
ATTRIBUTES = frozenset(
    (
        "thread_position_in_grid",
        "thread_position_in_threadgroup",
        "thread_index_in_threadgroup",
        "thread_index_in_simdgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "dispatch_simdgroups_per_threadgroup",
        "threads_per_simdgroup",
        "thread_execution_width",
        "threadgroup_position_in_grid",
        "threadgroups_per_grid",
        "threads_per_threadgroup",
        "dispatch_threads_per_threadgroup",
        "threads_per_grid",
    )
)
_LITERAL = re.compile(r"(\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)(h|H|bf|BF)")
# Names of the operations that wait for other threads; they get an argument of type Where.
_SYNC_CALL = re.compile(
    "(threadgroup|simdgroup)_barrier|simd_(sum|product|max|min|and|or|xor|all|any|ballot|active_threads_mask)"
    "|simd_(prefix|shuffle|broadcast)[a-z_]*"
)
_SUFFIXES = {"h": "half", "bf": "bfloat"}
_LIMIT = "max_total_threads_per_threadgroup"


@dataclass(frozen=True)
class KernelSource:
    """A kernel that can be launched: it has no template parameters, or is an instantiation."""

    name: str  # name by which the host launches it
    buffers: tuple[str, ...]  # the declared name of each buffer argument
    variables: tuple[str, ...]  # names of threadgroup variables; the index is the number by which the runtime knows one
    max_threads: int  # of a threadgroup


@dataclass(frozen=True)
class Translation:
    """The C++ source and its kernels: the entry point of kernel number i is emulator_kernel_i."""

    text: str
    kernels: tuple[KernelSource, ...]


class _Signature(NamedTuple):
    """The parameters of a kernel's entry point; all instantiations of a template share them."""

    bindings: tuple[str, ...]  # binding of each parameter: a type in include/emulated/binding.h
    buffers: tuple[str, ...]  # as in KernelSource
    variables: tuple[str, ...]
    max_threads: int


@dataclass(frozen=True)
class Variable:
    """A declaration of threadgroup variables in a kernel, `threadgroup type a[1], b;`; places are indices of tokens."""

    begin: int
    end: int  # after the semicolon
    type: tuple[int, int]
    declarators: tuple[tuple[int, int], ...]  # name and array bounds


def find_threadgroup_variables(source: Source, begin: int, end: int) -> list[Variable]:
    """Return the threadgroup variables declared in tokens [begin, end), without pointers to threadgroup memory."""
    found = []
    for i in range(begin, end):
        if source.tokens[i].text != "threadgroup" or source.tokens[i - 1].text not in (";", "{", "}", ")", ":"):
            continue
        last = i
        while source.tokens[last].text != ";":
            last += 1
        if _is_pointer(source, i + 1, last) or source.is_at(i + 1, "("):
            continue
        pieces = source.split_at_commas(i + 1, last)
        name = pieces[0][0]
        while name + 1 < pieces[0][1] and source.tokens[name + 1].text not in ("[", "=", "{"):
            name = source.find_closing_angle(name + 1) if source.tokens[name + 1].text == "<" else name + 1
        found.append(Variable(i, last + 1, (i + 1, name), ((name, pieces[0][1]), *pieces[1:])))
    return found


def _is_pointer(source: Source, begin: int, end: int) -> bool:
    """Return whether tokens [begin, end) declare a pointer or reference: `T* p`, `T& r` or `T (*p)[2]`."""
    i = begin
    while i < end and source.tokens[i].text not in ("[", "=", "{"):
        if source.tokens[i].text in ("*", "&"):
            return True
        i = source.find_closing_angle(i) + 1 if source.tokens[i].text == "<" else i + 1
    return False


class Translator:
    """Translates one source. Raises SyntaxError with the line if a kernel is invalid."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._edits: list[tuple[int, int, str]] = []  # replacements in the text: (start, end, new text)
        self._kernels: list[KernelSource] = []
        self._templates: dict[str, _Signature] = {}  # of templates of kernels

    def translate(self) -> Translation:
        for each in find_declarations(self._source):
            if each.is_kernel(self._source):
                self._translate_kernel(each)
            elif each.kind is DeclarationKind.INSTANTIATION:
                self._translate_instantiation(each)
        for i, text in find_swizzles(self._source):
            self._replace(i, i + 1, text)
        self._insert_call_sites()
        self._translate_literals()
        self._remove_duplicate_const()
        return Translation(self._apply_edits(), tuple(self._kernels))

    # ---- kernels

    def _translate_kernel(self, kernel: Declaration) -> None:
        tokens = self._source.tokens
        limit, host = MAX_THREADS, kernel.name
        for first, after, begin, end in self._source.find_attributes(kernel.begin, kernel.parameters[0]):
            if tokens[first].text == _LIMIT:
                limit = self._attribute_number(first)
            elif tokens[first].text == "host_name":
                host = self._attribute_string(first, after)
            self._replace(begin, end, "")
        for i in range(kernel.begin, kernel.parameters[0]):
            if tokens[i].text == "kernel":
                self._replace(i, i + 1, "")
        bindings, buffers = self._bind_parameters(kernel)
        signature = _Signature(bindings, buffers, self._translate_variables(kernel), limit)
        begin = self._source.find_closing_angle(kernel.begin + 1) + 1 if kernel.is_template else kernel.begin
        self._insert(tokens[begin].start, "EMULATOR_KERNEL ")
        if kernel.is_template:
            self._templates[kernel.name] = signature
        else:
            self._insert(tokens[kernel.end - 1].end, self._make_entry_point(host, kernel.name, signature))

    def _translate_instantiation(self, each: Declaration) -> None:
        names = [
            self._attribute_string(first, after)
            for first, after, _, _ in self._source.find_attributes(each.begin, each.end)
            if self._source.tokens[first].text == "host_name"
        ]
        callee = self._find_callee(each)
        name = re.split(r"\s*<", callee)[0].split("::")[-1].strip()
        if not names or name not in self._templates:
            return  # not of a kernel
        self._replace(each.begin, each.end, self._make_entry_point(names[0], callee, self._templates[name]))

    def _find_callee(self, each: Declaration) -> str:
        """Return the instantiated function, such as `f<float>` of `template kernel void f<float>(...);`."""
        for i in range(each.begin, each.end):
            if self._source.tokens[i].text == "decltype":
                return self._source.slice(i + 2, self._source.find_closing(i + 1))
            if self._source.tokens[i].text == "void":
                return self._source.slice(i + 1, each.parameters[0] - 1)
        return each.name

    def _make_entry_point(self, host: str, callee: str, signature: _Signature) -> str:
        number, callee = len(self._kernels), " ".join(callee.split())
        self._kernels.append(KernelSource(host, signature.buffers, signature.variables, signature.max_threads))
        types = ", ".join(f"::emulator::{binding}" for binding in signature.bindings)
        return (
            f" EMULATOR_ENTRY void emulator_kernel_{number}"
            "(const ::emulator::Context& context, const ::emulator::Thread& self)"
            f" {{ ::emulator::call<{types}>(&{callee}, context, self); }}"
            f" EMULATOR_ENTRY int emulator_describe_{number}(::emulator::Parameter* to)"
            f" {{ return ::emulator::describe<{types}>(&{callee}, to); }} "
        )

    def _bind_parameters(self, kernel: Declaration) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (the binding of each parameter, the names of the buffers by index)."""
        bindings: list[str] = []
        buffers: dict[int, str] = {}
        for begin, end in self._source.split_at_commas(*kernel.parameters):
            bound = self._bind_parameter(kernel, begin, end, max(buffers, default=-1) + 1)
            if isinstance(bound, str):
                bindings.append(bound)
                continue
            if bound in buffers:
                raise SyntaxError(
                    f"{self._source.location(begin)}: buffer {bound} has two parameters: number them 0, 1, ..."
                )
            bindings.append(f"buffer<{bound}>")
            buffers[bound] = self._parameter_name(begin, end)
        self._check_indices(kernel, buffers)
        return tuple(bindings), tuple(buffers[i] for i in range(len(buffers)))

    def _bind_parameter(self, kernel: Declaration, begin: int, end: int, unnumbered: int) -> str | int:
        """Return the binding of a parameter: the name of an attribute, or the index of a buffer.

        A buffer without [[buffer(n)]] gets the index `unnumbered`. Removes the parameter's attributes.
        """
        tokens = self._source.tokens
        bound: str | int | None = unnumbered if any(token.text in "*&" for token in tokens[begin:end]) else None
        for first, _, start, stop in self._source.find_attributes(begin, end):
            if tokens[first].text == "buffer":
                bound = self._attribute_number(first)
            elif tokens[first].text in ATTRIBUTES:
                bound = tokens[first].text
            self._replace(start, stop, "")
        if bound is None:
            raise SyntaxError(
                f"{self._source.location(begin)}: parameter '{self._parameter_name(begin, end)}' of kernel "
                f"'{kernel.name}' is bound to nothing: make it a constant reference, or give it an attribute "
                "such as [[thread_position_in_grid]]"
            )
        return bound

    def _check_indices(self, kernel: Declaration, buffers: dict[int, str]) -> None:
        place = self._source.location(kernel.begin)
        if len(buffers) > MAX_BUFFERS:
            raise SyntaxError(
                f"{place}: kernel '{kernel.name}' has {len(buffers)} buffers, but Metal allows {MAX_BUFFERS}: "
                "put some into a struct"
            )
        missing = [i for i in range(len(buffers)) if i not in buffers]
        if missing:
            raise SyntaxError(
                f"{place}: kernel '{kernel.name}' has no buffer {missing[0]}: "
                f"compile_shader passes argument i as buffer i, so number them 0 to {len(buffers) - 1}"
            )

    def _parameter_name(self, begin: int, end: int) -> str:
        """Return the name of a parameter in tokens [begin, end): its last word before the attributes."""
        words = [begin]
        for i in range(begin, end):
            if self._source.tokens[i].text in ("[", "="):
                break
            if self._source.tokens[i].is_word:
                words.append(i)
        return self._source.tokens[words[-1]].text

    def _attribute_number(self, attribute: int) -> int:
        """Return the number n of an attribute such as buffer(n), whose name is token `attribute`."""
        tokens = self._source.tokens[attribute : attribute + 4]
        if len(tokens) == 4 and tokens[2].text.isdigit() and tokens[3].text == ")":
            return int(tokens[2].text)
        raise SyntaxError(f"{self._source.location(attribute)}: write a number into [[{tokens[0].text}(...)]]")

    def _attribute_string(self, first: int, after: int) -> str:
        """Return the strings of an attribute such as host_name("a" "b"), joined."""
        return "".join(token.text[1:-1] for token in self._source.tokens[first + 2 : after - 1])

    # ---- the parts of Metal that C++ does not have

    def _translate_variables(self, kernel: Declaration) -> tuple[str, ...]:
        """Turn threadgroup variables into references to memory, known to the runtime by number; return their names."""
        names: list[str] = []
        for variable in find_threadgroup_variables(self._source, *kernel.body):
            type_, made = self._source.slice(*variable.type), ""
            for name, end in variable.declarators:
                number, text = len(names), self._source.tokens[name].text
                names.append(text)
                made += (
                    f"typedef {type_} emulated_{number}{self._source.slice(name + 1, end)}; "
                    f"emulated_{number}& {text} = ::emulator::variable<emulated_{number}>({number}); "
                )
            self._replace(variable.begin, variable.end, made)
        if len(names) > MAX_VARIABLES:
            raise SyntaxError(
                f"{self._source.location(kernel.begin)}: kernel '{kernel.name}' has {len(names)} threadgroup "
                f"variables, but the emulator allows {MAX_VARIABLES}: put some into a struct or an array"
            )
        return tuple(names)

    def _insert_call_sites(self) -> None:
        """Add to each call of a barrier or simd operation its line and column, as a line may have two calls."""
        defined = {each.name for each in find_declarations(self._source) if each.kind is DeclarationKind.FUNCTION}
        for i in range(1, len(self._source.tokens) - 1):
            before, name = self._source.tokens[i - 1].text, self._source.tokens[i].text
            if (
                not _SYNC_CALL.fullmatch(name)
                or not self._source.is_at(i + 1, "(")
                or name in defined
                or before in (".", "->")
            ):
                continue
            last, (line, column) = self._source.find_closing(i + 1), self._source.line_and_column(i)
            comma = "" if last == i + 2 else ", "
            where = f"{comma}::emulator::Where(__builtin_FILE(), {line}, {column})"
            self._insert(self._source.tokens[last].start, where)

    def _translate_literals(self) -> None:
        for i, token in enumerate(self._source.tokens):
            if found := _LITERAL.fullmatch(token.text):
                self._replace(i, i + 1, f"{_SUFFIXES[found[2].lower()]}({found[1]}f)")

    def _remove_duplicate_const(self) -> None:
        """Remove the const of `const constant`: `constant` alone becomes const in C++, which forbids it twice."""
        for i in range(len(self._source.tokens) - 1):
            if self._source.is_at(i, "const", "constant"):
                self._replace(i, i + 1, "")
            elif self._source.is_at(i, "constant", "const"):
                self._replace(i + 1, i + 2, "")

    # ---- edits

    def _replace(self, begin: int, end: int, text: str) -> None:
        tokens = self._source.tokens
        start, stop = tokens[begin].start, tokens[end - 1].end
        lines = self._source.text.count("\n", start, stop)
        self._edits.append((start, stop, text + "\n" * lines))

    def _insert(self, at: int, text: str) -> None:
        """Add an edit that inserts a text at an offset of the source."""
        self._edits.append((at, at, text))

    def _apply_edits(self) -> str:
        parts, done = [], 0
        for start, stop, text in sorted(set(self._edits)):
            if start < done:
                continue  # skip an edit of text that an earlier edit replaced
            parts += [self._source.text[done:start], text]
            done = stop
        return "".join([*parts, self._source.text[done:]])
