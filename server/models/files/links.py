"""Where links in a model's directory may lead, checked once before any file of it is read. Imports no torch.

A model's directory comes from its author, and a link in it could have the server read, and serve, a file of
this machine that has nothing to do with the model. What is checked: the directory itself and the folder of further chat
templates, which is all that is read, and the names of files in indices of weights. The directory may itself be a link,
as the user has named it. Knows no file's contents but the indices'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from server.models.config_file import read_json
from server.models.errors import ModelError

TEMPLATES = "additional_chat_templates"
INDICES = "*.index.json"


def check_links(directory: Path, *, made_here: Path | None) -> None:
    """Raise ModelError for a link that leads out of the directory, and for what is neither a file nor a directory.

    A link may also lead to the blobs of the same entry of Hugging Face's cache; `made_here` is a link that kvmux made,
    and may lead anywhere.
    """
    try:
        root = directory.resolve(strict=True)
        allowed = [root, *_blobs(root)]
        for path in _iter_entries(root):
            if path.is_symlink():
                _check_link(path, allowed if path != made_here else [Path("/")])
            elif not path.is_file() and not path.is_dir():
                raise ModelError(f"{path} is neither a file nor a directory: take it out of the model's directory")
        for index in root.glob(INDICES):
            _check_index(index)
    except OSError as error:
        raise ModelError(f"cannot read the directory {directory}: {error.strerror}") from None


def _iter_entries(root: Path) -> Iterator[Path]:
    """Yield everything in the directory, and in the folder of templates unless that is a link."""
    yield from sorted(root.iterdir())
    templates = root / TEMPLATES
    if templates.is_dir() and not templates.is_symlink():
        yield from sorted(templates.iterdir())


def _check_link(link: Path, allowed: Iterable[Path]) -> None:
    try:
        target = link.resolve()
    except RuntimeError:
        raise ModelError(f"{link} is a link that leads to itself: remove it") from None
    if not any(target.is_relative_to(place) for place in allowed):
        raise ModelError(
            f"{link} is a link to {target}, outside of the model's directory: put the file itself there, or give "
            "--allow-symlinks if you trust the directory"
        )


def _blobs(root: Path) -> list[Path]:
    """Return the folder that links in models--OWNER--NAME/snapshots/REVISION lead to; none for other directories."""
    entry = root.parent.parent
    in_cache = root.parent.name == "snapshots" and entry.name.startswith("models--")
    return [entry / "blobs"] if in_cache else []


def _check_index(index: Path) -> None:
    """Raise ModelError if an index names a file by more than its name."""
    try:
        names = read_json(index).get("weight_map")
    except ModelError:  # the reader of the index raises this again
        return
    for name in names.values() if isinstance(names, dict) else ():
        if isinstance(name, str) and ("/" in name or name == ".."):
            raise ModelError(f"{index} names the file {name!r}: only files beside the index are read")
