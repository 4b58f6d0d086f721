"""`python -m tools.sample_docstrings`: draws docstrings, comments and messages at random, to judge them one by one.

The draw is uniform over all texts of the product or, with --under, of the given folders; the same seed gives the same
list for the same code. Comments have at least five words, messages at least three. Imports none of the code it reads.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

ROOT = Path(__file__).parents[1]
PRODUCT = ("config", "kernels", "cache_strategies", "server", "loadtest", "plugin_kit")
C_SUFFIXES = (".cpp", ".h", ".metal")
MIN_COMMENT_WORDS, MIN_MESSAGE_WORDS = 5, 3
LOGGERS = ("log", "logger", "logging")
HELP_KEYWORDS = ("help", "description", "epilog")  # of argparse and pydantic
RULER = re.compile(r"-{8,} *")  # the line before the title of a file's section
DIRECTIVE = re.compile(r"(noqa|type:|pragma|ruff:|fmt:|mypy:|NOLINT|clang-format|#!)")
C_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)', re.DOTALL)

Kind = Literal["docstring", "comment", "message"]
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Text(NamedTuple):
    """A docstring, comment or message, and its place."""

    file: str  # relative to the root of the checkout
    line: int
    kind: Kind
    text: str
    context: str = ""  # of a docstring: qualified name and signature; of a trailing comment: the code before it


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.sample_docstrings", description=__doc__)
    parser.add_argument("--seed", type=int, default=27, help="seed of the draw (default: %(default)s)")
    parser.add_argument("--count", type=int, default=30, help="number of texts (default: %(default)s)")
    parser.add_argument(
        "--under", action="append", metavar="FOLDER", help="folder or file to draw from; may be repeated"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to read (default: this one)")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    options = parser.parse_args(arguments)
    texts = draw(collect(options.root, options.under or PRODUCT), options.seed, options.count)
    if not texts:
        parser.error(f"there are no texts of {', '.join(options.under or PRODUCT)} in {options.root}")
    if options.json:
        print(json.dumps([text._asdict() for text in texts], indent=2))
        return
    for number, text in enumerate(texts, start=1):
        print(f"{number}. {text.file}:{text.line} {text.kind}")
        for line in (*text.context.splitlines(), *text.text.splitlines()):
            print(f"    {line}")


def draw(texts: Sequence[Text], seed: int, count: int) -> list[Text]:
    """Return `count` of the texts, or all if there are fewer, in random order."""
    return Random(seed).sample(texts, min(count, len(texts)))


def collect(root: Path, folders: Sequence[str]) -> list[Text]:
    """Return all texts of the Python, C++ and Metal files in these folders, in the order of files and lines."""
    found: list[Text] = []
    for folder in folders:
        path = root / folder
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = str(file.relative_to(root))
            if file.suffix == ".py":
                source = file.read_text(encoding="utf-8")
                found += [*iter_docstrings(source, name), *iter_messages(source, name), *iter_comments(source, name)]
            elif file.suffix in C_SUFFIXES:
                found += iter_c_comments(file.read_text(encoding="utf-8"), name)
    return sorted(found)


# ---------------------------------------------------------------- Python
def iter_docstrings(source: str, file: str) -> Iterator[Text]:
    """Yield the docstrings of a Python file's module, classes and functions."""
    yield from _iter_docstrings(ast.parse(source), file, file.removesuffix(".py").replace("/", "."), "")


def _iter_docstrings(node: Documented, file: str, name: str, signature: str) -> Iterator[Text]:
    if text := ast.get_docstring(node):
        yield Text(file, node.body[0].lineno, "docstring", text, name + signature)
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _iter_docstrings(child, file, f"{name}.{child.name}", _format_signature(child))


def _format_signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def iter_messages(source: str, file: str) -> Iterator[Text]:
    """Yield the strings of raised errors, calls of error classes, log calls and help texts of a Python file."""
    seen: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(source)):
        for part in _find_message_parts(node):
            for literal in _iter_strings(part):
                text, place = _render_string(literal), (literal.lineno, literal.col_offset)
                if place not in seen and len(text.split()) >= MIN_MESSAGE_WORDS:
                    seen.add(place)
                    yield Text(file, literal.lineno, "message", text)


def _find_message_parts(node: ast.AST) -> list[ast.expr]:
    """Return the expressions within a node that are shown to people: arguments of errors, logs and help texts."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return [*node.exc.args, *(keyword.value for keyword in node.exc.keywords)]
    if isinstance(node, ast.Call):
        is_log = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value).split(".")[-1] in LOGGERS
        name = ast.unparse(node.func)
        if is_log or name.endswith(("Error", "Refused", "TooLong", "Unavailable")):
            return node.args
        return [keyword.value for keyword in node.keywords if keyword.arg in HELP_KEYWORDS]
    return []


def _iter_strings(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the string literals of an expression, f-strings as a whole."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        yield node
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _iter_strings(child)


def _render_string(node: ast.expr) -> str:
    """Return the text of a string literal, with "{...}" for the values of an f-string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_render_string, node.values))
    return str(node.value) if isinstance(node, ast.Constant) else "{...}"


def iter_comments(source: str, file: str) -> Iterator[Text]:
    """Yield the comments of a Python file; successive lines of comments are one."""
    comments = [
        (token.start[0], token.line[: token.start[1]].strip(), token.string.lstrip("# "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    yield from _join_comments(comments, file)


# ---------------------------------------------------------------- C++ and Metal
def iter_c_comments(source: str, file: str) -> Iterator[Text]:
    """Yield the comments of a C++ or Metal file; successive lines of `//` are one."""
    comments = []
    for match in C_TOKEN.finditer(source):
        if text := match["line"] or match["block"]:
            begin = source.rfind("\n", 0, match.start()) + 1
            lines = [line.strip("/* \t") for line in text.splitlines()]
            comments.append(
                (source.count("\n", 0, match.start()) + 1, source[begin : match.start()].strip(), "\n".join(lines))
            )
    yield from _join_comments(comments, file)


def _join_comments(comments: Sequence[tuple[int, str, str]], file: str) -> Iterator[Text]:
    """Yield comments from (line, code before it, text); successive lines without code are one comment."""
    joined: list[tuple[int, int, str, str]] = []  # first line, last line, code, text
    for line, code, text in comments:
        if DIRECTIVE.match(text):
            continue
        text = RULER.sub("", text)
        first, last, code_before, text_before = joined[-1] if joined else (0, -1, "", "")
        if not code and not code_before and line == last + 1:
            joined[-1] = (first, line, "", f"{text_before}\n{text}")
        else:
            joined.append((line, line, code, text))
    for line, _, code, text in joined:
        if len(text.split()) >= MIN_COMMENT_WORDS:
            yield Text(file, line, "comment", text.strip(), code)


if __name__ == "__main__":
    main()
