"""Checks that symbolic links in a model's directory do not lead out of it, before its files are read.

A model's directory comes from its author, and a link in it could make the server read, and serve, another file of this
machine. The check covers all that the server reads: the directory, its folder of additional chat templates, and the
file names in the indices of weights. The directory itself may be a link, as the user chose it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from server.models.config_file import read_json
from server.models.errors import ModelError
from server.models.files.hub import find_name

TEMPLATES = "additional_chat_templates"
INDICES = "*.index.json"


def check_links(directory: Path, *, made_here: Sequence[Path]) -> None:
    """Raise ModelError for a link that leads out of the directory, and for an entry that is no file or directory.

    Links to the blobs of the same model in Hugging Face's cache are allowed, and `made_here`, links that kvmux made
    itself.
    """
    try:
        root = directory.resolve(strict=True)
        allowed = [root, *_blobs(root)]
        for path in _iter_entries(root):
            if path.is_symlink():
                _check_link(path, allowed if path not in made_here else [Path("/")])
            elif not path.is_file() and not path.is_dir():
                raise ModelError(f"{path} is neither a file nor a directory: take it out of the model's directory")
        for index in root.glob(INDICES):
            _check_index(index)
    except OSError as error:
        raise ModelError(f"cannot read the directory {directory}: {error.strerror}") from None


def _iter_entries(root: Path) -> Iterator[Path]:
    """Yield the entries of a model's directory, and of its folder of chat templates unless that folder is a link."""
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
    """Return the blobs folder of a directory models--OWNER--NAME/snapshots/REVISION; [] for other directories."""
    return [] if find_name(root) is None else [root.parent.parent / "blobs"]


def _check_index(index: Path) -> None:
    """Raise ModelError if an index of weights names a file in another directory."""
    try:
        names = read_json(index).get("weight_map")
    except ModelError:  # an unreadable index is reported by the loader of the weights
        return
    for name in names.values() if isinstance(names, dict) else ():
        if isinstance(name, str) and ("/" in name or name == ".."):
            raise ModelError(f"{index} names the file {name!r}: only files beside the index are read")
