"""Draws mutants with cosmic-ray, in its own environment: `python draw.py ROOT SEED COUNT FILE ...` prints JSON.

A file is drawn by its number of lines, then one of its mutations. Mutations of annotations and docstrings are left out:
they change nothing that runs.
"""

from __future__ import annotations

import ast
import difflib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names


class Mutation(NamedTuple):
    """A place where one of cosmic-ray's operators changes a file."""

    operator: str
    occurrence: int


def main(root: str, seed: str, count: str, *files: str) -> None:
    sources = {file: (Path(root) / file).read_text() for file in files}
    print(json.dumps(list(draw(sources, random.Random(int(seed)), int(count)))))


def draw(sources: dict[str, str], rng: random.Random, count: int) -> Iterator[dict[str, str]]:
    """Yield the name, file and patch of each mutant."""
    mutations: dict[str, list[Mutation]] = {}
    weights = [len(text.splitlines()) for text in sources.values()]
    seen = set()
    while len(seen) < count:
        [file] = rng.choices(list(sources), weights)
        source = sources[file]
        if file not in mutations:
            mutations[file] = list(find_mutations(source))
        if not mutations[file]:
            continue
        mutation = rng.choice(mutations[file])
        mutant = mutate_code(source, get_operator(mutation.operator)(), mutation.occurrence)
        if (file, mutation) in seen or mutant is None or strip(mutant) in (None, strip(source)):
            continue
        seen.add((file, mutation))
        lines = difflib.unified_diff(
            source.splitlines(keepends=True), mutant.splitlines(keepends=True), f"a/{file}", f"b/{file}"
        )
        name = f"{file} {mutation.operator.removeprefix('core/')} {mutation.occurrence}"
        yield {"name": name, "file": file, "patch": "".join(lines)}


def find_mutations(source: str) -> Iterator[Mutation]:
    """Yield every mutation of operators without arguments."""
    nodes = list(ast_nodes(get_ast(source)))
    for name in operator_names():
        operator = get_operator(name)
        if not operator.arguments():
            places = sum(len(list(operator().mutation_positions(node))) for node in nodes)
            yield from (Mutation(name, occurrence) for occurrence in range(places))


def strip(source: str) -> str | None:
    """Return a dump of the program without annotations of parameters and results, or None if it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                node.returns = None
            case ast.arg():
                node.annotation = None
            case ast.AnnAssign(target=ast.Name() | ast.Attribute(), value=value) if value is not None:
                node.annotation = ast.Constant(None)
    return ast.dump(tree)


if __name__ == "__main__":
    main(*sys.argv[1:])
