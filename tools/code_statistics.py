"""`python -m tools.code_statistics`: prints figures about the code's layout (folders, names, lengths), also as JSON.

`--root` counts another checkout, so that two commits can be compared. TOOLING_MODULES only measure, train or plot; the
other installed modules are the product. Imports none of the code that it counts.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeGuard

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PACKAGES = ("config", "kernels", "cache_strategies", "server", "loadtest", "plugin_kit", "tools")
INSTALLED = PACKAGES[:-1]
# Modules that only measure, train or plot, under their names before and after they moved to tools/.
TOOLING_MODULES = (
    "kernels.bench",
    "kernels.loads",
    "kernels.probe",
    "loadtest",
    "plugin_kit",
    "server.benchmarks",
    "server.evaluation",
    "server.measuring",
    "server.metrics.dashboards",
    "server.profiling",
    "server.training",
)
# Commands of `kvmux`: they stay installed.
INSTALLED_TOOLING = ("server.evaluation", "server.profiling", "loadtest", "plugin_kit")
EXAMPLES = {  # kind of feature that contributors add: a pattern in the files that mention a typical one
    "operation": r"def rms_norm\(|\"rms_norm\"",  # files that describe it, not those that call it
    "sampling parameter": r"\bmin_p\b",
    "metric": r"\bPREEMPTIONS\b",
    "strategy": r"\bSlidingWindowCache\b|kind=\"sliding_window\"",  # transformers has settings of that name, too
}


# Classes behind the seams; code above a seam that asks for one of them knows more than the seam says
CLASS_BEHIND_SEAM = re.compile(r"(Seat|Ops|Decoder|Cache|Plan|Model)$")


class Lengths(NamedTuple):
    """The lengths of functions, in lines."""

    median: int
    p90: int
    longest: int


class Statistics(NamedTuple):
    """The figures of a checkout."""

    folders: Mapping[str, tuple[int, int]]  # folder: number of modules and of lines
    tooling_share: float  # share of the installed lines that is in TOOLING_MODULES
    files_to_touch: Mapping[str, int]  # kind of feature: number of the product's files that mention its example
    classes_with_one_name: Mapping[str, Sequence[str]]  # class name that is not unique: the modules that define it
    functions: Lengths
    seam_type_checks: Mapping[str, int]  # isinstance() of seats, caches, backends and models, by module
    replaced_attributes: Mapping[str, int]  # statements that replace attributes of other objects, by module


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.code_statistics", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(arguments)
    if not find_modules(options.root):
        parser.error(f"--root: there are no modules of this project in {options.root}")
    figures = compute_statistics(options.root)
    if options.json:
        print(json.dumps(figures._asdict(), indent=2))
    else:
        print_tables(figures, Console())


def compute_statistics(root: Path) -> Statistics:
    """Count the Python files of a checkout."""
    sources = {name: file.read_text() for name, file in find_modules(root).items()}
    installed = {name: text for name, text in sources.items() if name.split(".")[0] in INSTALLED}
    folders: dict[str, tuple[int, int]] = {}
    for name, file in find_modules(root).items():
        folder = str(file.parent.relative_to(root))
        count, lines = folders.get(folder, (0, 0))
        folders[folder] = count + (file.name != "__init__.py"), lines + len(sources[name].splitlines())
    tooling_lines = sum(len(text.splitlines()) for name, text in installed.items() if is_within(name, TOOLING_MODULES))
    lines = sum(len(text.splitlines()) for text in installed.values())
    return Statistics(
        dict(sorted(folders.items())),
        tooling_lines / lines,
        {kind: count_files_matching(installed, example) for kind, example in EXAMPLES.items()},
        find_shared_class_names(installed),
        compute_lengths(installed.values()),
        count_by_module(installed, count_seam_type_checks),
        count_by_module(installed, count_replaced_attributes),
    )


def find_modules(root: Path) -> dict[str, Path]:
    """Return the files of all packages by the names of their modules."""
    files = (file for package in PACKAGES for file in sorted((root / package).rglob("*.py")))
    names = {file: ".".join(file.relative_to(root).with_suffix("").parts) for file in files}
    return {name.removesuffix(".__init__"): file for file, name in names.items()}


def is_within(name: str, packages: Sequence[str]) -> bool:
    """Return whether a module is one of these packages or in one of them."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def count_files_matching(sources: Mapping[str, str], pattern: str) -> int:
    """Return the number of files that match a pattern, without those that only measure or train."""
    tooling = [name for name in TOOLING_MODULES if name not in INSTALLED_TOOLING]
    return sum(bool(re.search(pattern, text)) for name, text in sources.items() if not is_within(name, tooling))


def find_shared_class_names(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return each class name that several modules define, with these modules."""
    modules_by_class: dict[str, list[str]] = defaultdict(list)
    for module, text in sources.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                modules_by_class[node.name].append(module)
    return {name: where for name, where in sorted(modules_by_class.items()) if len(where) > 1}


def compute_lengths(sources: Iterable[str]) -> Lengths:
    """Return the median, 90th percentile and maximum of the functions' lengths, from `def` to the last line."""
    lines = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for text in sources
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return Lengths(
        round(statistics.median(lines)), round(statistics.quantiles(lines, n=10, method="inclusive")[-1]), max(lines)
    )


def count_by_module(sources: Mapping[str, str], count: Callable[[ast.AST], int]) -> dict[str, int]:
    """Return what `count` finds in each module, without modules in which it finds nothing."""
    counts = {name: count(ast.parse(text)) for name, text in sources.items()}
    return {name: number for name, number in counts.items() if number}


def count_seam_type_checks(tree: ast.AST) -> int:
    """Return the number of isinstance() calls that ask for a class behind a seam."""
    calls = [node for node in ast.walk(tree) if is_call(node, "isinstance")]
    named = [[ast.unparse(name) for name in iter_classes(call.args[1])] for call in calls]
    return sum(any(CLASS_BEHIND_SEAM.search(name) for name in names) for names in named)


def iter_classes(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the classes of isinstance()'s second argument: one, a tuple, or a union."""
    match node:
        case ast.Tuple(elts=classes):
            yield from classes
        case ast.BinOp(left=left, right=right):
            yield from (*iter_classes(left), *iter_classes(right))
        case _:
            yield node


def count_replaced_attributes(tree: ast.AST) -> int:
    """Return the number of setattr() and delattr() calls on other objects than `self`, and of writes through vars()."""
    found = 0
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = [node for statement in function.body for node in ast.walk(statement)]
        found += sum(
            (is_call(node, "setattr") or is_call(node, "delattr")) and ast.unparse(node.args[0]) != "self"
            for node in nodes
        )
        spaces = {
            ast.unparse(target)
            for node in nodes
            if isinstance(node, ast.Assign)
            and is_call(node.value, "vars")
            and not isinstance(node.value.args[0], ast.Call)
            for target in node.targets
        }
        found += sum(is_write(node, spaces) for node in nodes)
    return found


def is_call(node: ast.AST, function: str) -> TypeGuard[ast.Call]:
    """Return whether a node calls a function of this name."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function


def is_write(node: ast.AST, names: Collection[str]) -> bool:
    """Return whether a node updates one of these dictionaries, or sets or deletes an item."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update" | "pop" | "setdefault")):
            return name in names
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            return name in names
    return False


def print_tables(figures: Statistics, console: Console) -> None:
    """Print the figures as tables."""
    folders = Table("folder", "modules", "lines", title="folders")
    for folder, (count, lines) in figures.folders.items():
        folders.add_row(folder, str(count), f"{lines:,}")
    total = Counter[str]()
    for count, lines in figures.folders.values():
        total.update(modules=count, lines=lines)
    folders.add_row("all", str(total["modules"]), f"{total['lines']:,}", style="bold")
    console.print(folders)
    rest = Table("figure", "value", title="the rest")
    rest.add_row("installed lines that only measure, train or plot", f"{figures.tooling_share:.0%}")
    for kind, count in figures.files_to_touch.items():
        rest.add_row(f"files that mention one {kind}", str(count))
    rest.add_row("class names that several modules define", str(len(figures.classes_with_one_name)))
    rest.add_row("isinstance() of seats, caches, backends, models", str(sum(figures.seam_type_checks.values())))
    rest.add_row("places that replace attributes at run time", str(sum(figures.replaced_attributes.values())))
    rest.add_row("lines of a function: median, p90, maximum", " / ".join(map(str, figures.functions)))
    console.print(rest)


if __name__ == "__main__":
    main()
