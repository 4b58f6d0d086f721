"""docs/guide/plugin_api.md lists what plug-ins may import; template, examples and guide import nothing else."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_strategies import eviction, features, registry, scorers, types
from plugin_kit.new_package import write_package

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide"
PAGE = (GUIDE / "plugin_api.md").read_text()
ROW = re.compile(r"^\| `([\w.]+)` \| (.*) \|$", re.MULTILINE)
STABLE = {module: set(re.findall(r"`(\w+)`", names)) for module, names in ROW.findall(PAGE)}
OWN = ("cache_strategies", "kernels", "config", "plugin_kit", "server")
# Classes written as plug-ins; mixed_formats.py is a subclass of a built-in kind, which the page does not promise
EXAMPLES = [
    ROOT / "tests" / "contract" / file
    for file in ("third_party_strategy.py", "kinds/hooked.py", "kinds/thinned.py", "kinds/random_drop.py")
]


def find_imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each import of this project's packages."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in OWN:
            yield from ((node.module, alias.name) for alias in node.names)


def find_unstable_imports(source: str) -> list[tuple[str, str]]:
    return [(module, name) for module, name in find_imports(source) if name not in STABLE.get(module, ())]


@pytest.mark.parametrize("module", STABLE)
def test_what_is_listed_is_there(module: str) -> None:
    imported = importlib.import_module(module)
    assert STABLE[module]
    assert [name for name in STABLE[module] if not hasattr(imported, name)] == []


def test_all_data_and_all_features_are_listed() -> None:
    for module in (types, features):
        own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        assert own - {"check_data"} <= STABLE[module.__name__]


@pytest.mark.parametrize("is_scorer", [False, True])
def test_the_template_needs_nothing_else(is_scorer: bool, tmp_path: Path) -> None:
    folder = write_package("my_plugin", tmp_path, is_scorer=is_scorer)
    files = sorted(folder.rglob("*.py"))
    assert any(list(find_imports(file.read_text())) for file in files)
    assert {file.name: found for file in files if (found := find_unstable_imports(file.read_text()))} == {}


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_needs_nothing_else(file: Path) -> None:
    assert list(find_imports(file.read_text()))
    assert find_unstable_imports(file.read_text()) == []


def test_the_guide_needs_nothing_else() -> None:
    programs = re.findall(r"```python\n(.*?)```", "".join(file.read_text() for file in GUIDE.glob("*.md")), re.DOTALL)
    classes = [each for each in programs if re.search(r"^class \w+\((?!nn\.)", each, re.MULTILINE)]
    assert len(classes) >= 3
    assert [found for each in classes if (found := find_unstable_imports(each))] == []


def test_the_groups_of_entry_points_are_named() -> None:
    groups = (registry.ENTRY_POINT_GROUP, scorers.ENTRY_POINT_GROUP, eviction.ENTRY_POINT_GROUP)
    assert [group for group in groups if f"`{group}`" not in PAGE] == []


def test_an_import_of_something_else_is_found() -> None:
    source = "from cache_strategies.base import KVCache\nfrom cache_strategies.paged.cache import PagedCache"
    assert find_unstable_imports(source) == [("cache_strategies.paged.cache", "PagedCache")]
