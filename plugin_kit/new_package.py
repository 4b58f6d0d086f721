"""Writes a package with a strategy or a scorer, from the files in templates/, which say what they are for."""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template

from config.errors import SettingsError

TEMPLATES = Path(__file__).parent / "templates"
TAKEN = ("config", "kernels", "cache_strategies", "server", "loadtest", "plugin_kit", "kvmux", "test", "tests")


def write_package(name: str, parent: Path, *, is_scorer: bool) -> Path:
    """Write a package called `name` into a new folder of `parent`; return the folder.

    Raises SettingsError if the name cannot be that of a package, or if the folder exists.
    """
    module = name.replace("-", "_")
    if not (module.isidentifier() and module.isascii() and module == module.lower()) or keyword.iskeyword(module):
        raise SettingsError(
            f"{name!r} cannot be the name of a Python package: use lower-case letters, digits and underscores, and "
            "begin with a letter, such as my_cache"
        )
    if module in TAKEN or module.startswith("_"):
        raise SettingsError(f"a package called {name!r} would be in the way of another one; choose another name")
    folder = parent / module.replace("_", "-")
    if folder.exists():
        raise SettingsError(f"{folder} exists; choose another name, or move it away")
    words = _make_words(module, "scorer" if is_scorer else "strategy")
    for source, target in _iter_files(TEMPLATES / words["what"], folder, words):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(source.read_text()).substitute(words))
    (folder / module / "py.typed").touch()
    return folder


def _make_words(module: str, what: str) -> Mapping[str, str]:
    """Return what the templates' words stand for."""
    return {
        "module": module,
        "project": module.replace("_", "-"),
        "cls": "".join(part.capitalize() for part in module.split("_")),
        "what": what,
    }


def _iter_files(templates: Path, folder: Path, words: Mapping[str, str]) -> Iterator[tuple[Path, Path]]:
    """Yield the templates of a kind and of both kinds, and the files that they become."""
    for root in (templates, TEMPLATES / "both"):
        for source in sorted(root.rglob("*.template")):
            relative = source.relative_to(root).with_suffix("")
            yield source, folder / str(relative).replace("MODULE", words["module"])
