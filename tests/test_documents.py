"""Documents: links and named paths lead somewhere, the index lists every page, and a page opens with its readers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUPS = ("guide", "operations", "reference", "internals", "laboratory")
BOARDS = ROOT / "docs" / "laboratory" / "boards"  # which `kvmux evaluate --board` has written
PAGES = sorted(file for group in GROUPS for file in (ROOT / "docs" / group).rglob("*.md") if BOARDS not in file.parents)
LINK = re.compile(r"\]\(([^)\s]*)\)")
PATH = re.compile(r"`((?:[a-z_]+/)+[\w.]+)`((?:,?\s+`[A-Za-z_][\w.]*`)*)")  # a path, and names in that file after it
CODE_BLOCK = re.compile(r"^```.*?^```|^ {4}.*?$", re.DOTALL | re.MULTILINE)


def find_documents() -> list[Path]:
    """Return the Markdown files of the repository, without those in hidden folders such as a virtual environment."""
    files = sorted(ROOT.rglob("*.md"))
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(ROOT).parts)]


def make_anchor(heading: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lower()).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


def find_anchors(file: Path) -> set[str]:
    text = CODE_BLOCK.sub("", file.read_text())
    headings = {make_anchor(line.lstrip("#")) for line in text.splitlines() if line.startswith("#")}
    return headings | set(re.findall(r'<a id="([\w-]+)"></a>', text))  # where what a link led to has moved away


def find_broken_links(file: Path) -> Iterator[str]:
    """Yield the links of a document that lead to no file or to no heading."""
    for link in LINK.findall(CODE_BLOCK.sub("", file.read_text())):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (file.parent / path).resolve() if path else file
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in find_anchors(target)):
            yield link


@pytest.mark.parametrize("file", find_documents(), ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file: Path) -> None:
    assert list(find_broken_links(file)) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '# A `page`\n<a id="old"></a>[1](page.md#a-page) [2](#nowhere) [3](gone.md) [4](https://a.org) [5](#old)\n'
    )
    assert list(find_broken_links(page)) == ["#nowhere", "gone.md"]


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert {file.relative_to(ROOT / "docs").parts[0] for file in PAGES} == set(GROUPS)
    assert {link for link in LINK.findall(index) if link.endswith(".md") and not link.startswith("..")} == {
        str(file.relative_to(ROOT / "docs")) for file in PAGES
    }


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_a_page_opens_with_its_readers(file: Path) -> None:
    """A page's first line after its title begins with "*For ", and tells in a sentence or two whom it is for."""
    title, blank, opening, *_ = file.read_text().splitlines()
    assert title.startswith("# ")
    assert blank == ""
    assert opening.startswith("*For "), opening


# ---------------------------------------------------------------- paths in recipes
def find_missing_names(page: str) -> Iterator[str]:
    """Yield the paths in a page that are not there, and the names after a path that its file does not have."""
    for path, names in PATH.findall(page):
        file = ROOT / path
        if not file.exists():
            yield path
            continue
        known = set(re.findall(r"\w+", file.read_text())) if file.is_file() else set()
        for name in re.findall(r"`([^`]+)`", names):
            if not known.issuperset(name.split(".")):
                yield f"{path}: {name}"


def test_recipes_name_files_and_what_is_in_them() -> None:
    recipes = (ROOT / "docs" / "internals" / "recipes.md").read_text()
    assert len(PATH.findall(recipes)) > 80
    assert list(find_missing_names(recipes)) == []


def test_names_that_are_gone_are_found() -> None:
    page = "`config/gone.py` `config/settings.py` `Settings.model`, `Gone`: words `Settings` `tests/config`"
    assert list(find_missing_names(page)) == ["config/gone.py", "config/settings.py: Gone"]
