"""`python -m tests.statistics [CHECKOUT ...]`: counts in tests what ties them to the code or the clock, as JSON.

Hints, not aims: a patch of the operating system's clock may be right, and a private member of a test's own class is its
own. `python -m tests.statistics ../old .` compares two checkouts.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def count(root: Path) -> Counter[str]:
    """Count in all Python files of a checkout's tests."""
    found = Counter[str]()
    for file in sorted((root / "tests").rglob("*.py")):
        text = file.read_text()
        found.update(files=1, lines=len(text.splitlines()), ignores=len(re.findall(r"# type: ignore", text)))
        found.update(kind for node in ast.walk(ast.parse(text)) for kind in classify(node))
    return found


def classify(node: ast.AST) -> list[str]:
    """Return what a node counts as."""
    match node:
        case ast.Call(func=ast.Attribute(attr="setattr" | "delattr" | "setitem")):
            return ["patches"]
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[ast.Name(id=name), *_]) if name != "self":
            return ["patches"]
        case ast.Call(func=ast.Attribute(attr="sleep") | ast.Name(id="sleep")):
            return ["sleeps"]
        case ast.Attribute(attr="__class__", ctx=ast.Store()):
            return ["patches"]
        case (
            ast.Attribute(value=ast.Name(id="self" | "cls")) | ast.Attribute(value=ast.Call(func=ast.Name(id="super")))
        ):
            return []
        case ast.Attribute(attr=name) if is_private(name):
            return ["private members"]
        case ast.ImportFrom(names=names):
            return ["private members" for each in names if is_private(each.name)]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
            return ["test functions"]
    return []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


if __name__ == "__main__":
    for checkout in sys.argv[1:] or [ROOT]:
        print(json.dumps({"checkout": str(checkout)} | dict(sorted(count(Path(checkout)).items()))))
