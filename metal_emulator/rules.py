"""Rules for what Apple's compiler or compile_shader refuses although C++ accepts it. Each says what to write instead.

They work on tokens and declarations; faults that need types (a float bound to a half, say) are found by the C++
compiler.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from metal_emulator.scalars import SCALARS
from metal_emulator.syntax import Declaration, DeclarationKind, find_declarations
from metal_emulator.tokens import Source
from metal_emulator.translation import find_threadgroup_variables

Found = Iterator[tuple[int, str]]  # yields (index of a token, what is wrong with it)

FORBIDDEN_WORDS = {
    "double": "Metal has no double: write float",
    "goto": "Metal has no goto: write a loop or a condition",
    "new": "Metal has no memory to allocate: declare an array of a fixed size",
    "delete": "Metal has no memory to allocate: declare an array of a fixed size",
    "throw": "Metal has no exceptions: write the fault into a buffer",
    "try": "Metal has no exceptions: write the fault into a buffer",
    "catch": "Metal has no exceptions: write the fault into a buffer",
    "virtual": "Metal has no virtual functions: use a template",
    "dynamic_cast": "Metal has no type identification: use a template",
    "typeid": "Metal has no type identification: use a template",
    "thread_local": "Metal has no thread_local: declare the variable in the function",
    "register": "Metal has no register: leave it out",
    "asm": "Metal has no assembly: write Metal",
    "std": "Metal has no std: write metal::",
    "function_constant": "compile_shader cannot set function constants: use a template parameter",
}
FORBIDDEN_CALLS = {
    "printf": "Metal kernels cannot print: write into a buffer",
    "assert": "Metal kernels cannot assert: write into a buffer",
    "malloc": "Metal has no memory to allocate: declare an array of a fixed size",
}
ADDRESS_SPACES = frozenset(("device", "constant", "threadgroup", "thread", "ray_data", "object_data"))
_BUILTIN_TYPES = frozenset(("auto", *(f"{scalar.name}{n}" for scalar in SCALARS for n in ("", 2, 3, 4))))
_LINE = re.compile(r'^#line (\d+) "([^"\n]*)"$', re.MULTILINE)
_BEFORE_LAMBDA = frozenset(("(", ",", "=", "return", "{", ";", "&&", "||", "?", ":"))
_NO_SPACE = (
    "a pointer or reference needs an address space: write device, constant, threadgroup or thread before its type"
)


def check_text(source: str) -> None:
    """Check a source before it is preprocessed. Raises SyntaxError if it is not ASCII."""
    if not source.isascii():
        first = re.search(r"[^\x00-\x7F]", source)
        assert first is not None
        file, line, begin = "program_source", 1, 0
        for found in _LINE.finditer(source, 0, first.start()):
            file, line, begin = found[2], int(found[1]), found.end() + 1
        line += source.count("\n", begin, first.start())
        raise SyntaxError(f"{file}:{line}: compile_shader takes ASCII alone, in comments as well")


def check(source: Source) -> None:
    """Check the preprocessed source. Raises SyntaxError with a line for each fault, if there are any."""
    found = find_declarations(source)
    faults = [
        *_check_words(source),
        *_check_pointers(source),
        *_check_lambdas(source),
        *_check_recursion(source, found),
    ]
    for each in found:
        faults += [*_check_scope(source, each), *_check_threadgroup(source, each), *_check_parameters(source, each)]
    if faults:
        raise SyntaxError("\n".join(f"{source.location(i)}: {fault}" for i, fault in sorted(set(faults))))


def _check_words(source: Source) -> Found:
    for i, token in enumerate(source.tokens):
        if token.text in FORBIDDEN_WORDS and not source.is_at(i - 1, "."):
            if token.text != "std" or source.is_at(i + 1, "::"):
                yield i, f"'{token.text}': {FORBIDDEN_WORDS[token.text]}"
        elif token.text in FORBIDDEN_CALLS and source.is_at(i + 1, "("):
            yield i, f"'{token.text}': {FORBIDDEN_CALLS[token.text]}"
        elif source.is_at(i, "long", "long"):
            yield i, "'long long': Metal's long has 64 bits: write long"
        elif i and token.text in _BUILTIN_TYPES and source.tokens[i - 1].text in _BUILTIN_TYPES - {token.text}:
            yield i, f"'{token.text}' is a type in Metal: choose another name"
        elif source.is_at(i, "[", "[", "threadgroup", "("):
            yield i, "[[threadgroup(n)]]: compile_shader cannot size threadgroup memory: declare an array in the kernel"
        elif source.is_at(i, "(", "*") and source.is_at(i + 3, ")", "(") and source.tokens[i + 2].is_word:
            yield i, f"'{source.tokens[i + 2].text}': Metal has no function pointers: use a template parameter"


def _check_lambdas(source: Source) -> Found:
    for i, token in enumerate(source.tokens):
        if token.text == "[" and i and source.tokens[i - 1].text in _BEFORE_LAMBDA and not source.is_at(i, "[", "["):
            after = source.find_closing(i) + 1
            if source.is_at(after, "(") or source.is_at(after, "{"):
                yield i, "Metal 3 has no lambdas: write a function, or a struct with operator()"


def _check_pointers(source: Source) -> Found:
    """Yield pointers and references without an address space, such as `float* p` and `const half4& x`, anywhere."""
    for i, token in enumerate(source.tokens):
        if token.text not in _BUILTIN_TYPES or source.is_at(i - 1, "::") or source.is_at(i - 1, "operator"):
            continue
        last = i + 1
        while last < len(source.tokens) and source.tokens[last].text in ("const", "volatile", *ADDRESS_SPACES):
            last += 1
        if last == len(source.tokens) or source.tokens[last].text not in ("*", "&", "&&"):
            continue
        first = i
        while source.tokens[first - 1].text in ("const", "volatile", "static", "constexpr", *ADDRESS_SPACES):
            first -= 1
        if not ADDRESS_SPACES & {each.text for each in source.tokens[first:last]}:
            yield i, f"'{source.slice(first, last + 1)}': {_NO_SPACE}"


def _check_parameters(source: Source, function: Declaration) -> Found:
    """Yield parameters of a function that are pointers or references to structs and have no address space."""
    if function.kind is not DeclarationKind.FUNCTION:
        return
    for begin, end in source.split_at_commas(*function.parameters):
        texts = [token.text for token in source.tokens[begin:end]]
        pointers = [text for text in texts if text in ("*", "&", "&&")]
        if pointers and not (ADDRESS_SPACES | _BUILTIN_TYPES) & set(texts) and "=" not in texts:
            yield begin, f"'{source.slice(begin, end)}': {_NO_SPACE}"


def _check_scope(source: Source, variable: Declaration) -> Found:
    """Yield a variable outside functions that is not `constant`."""
    if variable.kind is not DeclarationKind.VARIABLE or variable.is_member:
        return
    texts = {token.text for token in source.tokens[variable.begin : variable.end]}
    if "constant" not in texts:
        yield variable.begin, "a variable outside functions must be a constant: write constant before its type"


def _check_threadgroup(source: Source, function: Declaration) -> Found:
    if function.kind is not DeclarationKind.FUNCTION:
        return
    for variable in find_threadgroup_variables(source, *function.body):
        name = source.tokens[variable.declarators[0][0]].text
        if not function.is_kernel(source):
            yield (
                variable.begin,
                f"'{name}': a threadgroup variable belongs into the kernel: declare it there and pass a pointer",
            )
        if {"=", "{"} & {token.text for token in source.tokens[variable.begin : variable.end]}:
            yield (
                variable.begin,
                f"'{name}': a threadgroup variable has no initialiser: assign it in one thread, then a barrier",
            )


def _is_call(source: Source, i: int) -> bool:
    """Return whether a name before a parenthesis may be a called function: no member, not f of `half4 f(1.0h);`."""
    before = source.tokens[i - 1]
    return before.text not in ("::", ".", "->") and (not before.is_word or before.text in ("return", "else", "do"))


def _check_recursion(source: Source, found: list[Declaration]) -> Found:
    """Yield recursive functions. Overloaded ones are skipped, as a name does not tell which of them is called."""
    functions = [each for each in found if each.kind is DeclarationKind.FUNCTION and not each.is_member]
    names = [each.name for each in functions]
    calls = {
        each.name: {
            source.tokens[i].text for i in range(*each.body) if source.is_at(i + 1, "(") and _is_call(source, i)
        }
        for each in functions
        if names.count(each.name) == 1
    }
    for each in functions:
        reached: set[str] = set()
        todo = set(calls.get(each.name, ()))
        while todo:
            name = todo.pop()
            reached.add(name)
            todo |= calls.get(name, set()) - reached
        if each.name in reached:
            yield each.begin, f"'{each.name}' calls itself: Metal has no recursion, write a loop"
