"""Turns the setting `model` (an embedded model, a directory, a GGUF file, a name on the hub) into a directory.

The first process does this before it starts the others, so that no two processes download or unpack the same model.
Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from server.models.errors import ModelError
from server.models.files import hub
from server.models.files.links import check_links
from server.models.formats.gguf_directory import ensure_unpacked, find_own_links
from server.models.formats.gguf_file import SUFFIX

if TYPE_CHECKING:
    from config.settings import Settings

EMBEDDED = {"tiny": Path(__file__).parents[1] / "tiny"}


def resolve_model_settings(settings: Settings) -> Settings:
    """Return settings whose `model` is its directory, with model_name filled in. Raises ModelError as `locate` does."""
    directory = locate(settings.model, settings.revision, allow_symlinks=settings.allow_symlinks)
    real = directory.resolve()
    name = settings.model if _is_on_hub(settings.model) else hub.find_name(real) or real.name
    known = {"model": str(directory), "revision": None, "model_name": settings.model_name or name}
    return settings.model_copy(update=known)


def locate(model: str, revision: str | None = None, *, allow_symlinks: bool = False) -> Path:
    """Return the directory with config.json and the other files, downloaded or unpacked if necessary.

    Raises ModelError if there is no such model, and for links out of its directory unless `allow_symlinks`; the
    embedded model is not checked.
    """
    on_hub = _is_on_hub(model)
    directory = _resolve(hub.fetch_model(model, revision) if on_hub else _expand_path(model))
    if not _is_model(directory):
        if on_hub and not any(directory.glob("*.json")):
            raise ModelError(f"{model} has no model but perhaps GGUF files: name the type of one, as {model}:Q4_K_M")
        if files := sorted(directory.glob(f"*{SUFFIX}")):
            raise ModelError(f"{model!r} is a directory with GGUF files: name one of them, such as {files[0]}")
        raise ModelError(
            f"no model at {model!r}: give a directory with config.json, tokenizer.json and *.safetensors, "
            f"a {SUFFIX} file, a name on the Hugging Face hub (owner/name, or owner/name:Q4_K_M for a GGUF file), "
            f"or an embedded model ({', '.join(EMBEDDED)})"
        )
    if revision is not None and not on_hub:
        raise ModelError(f"revision {revision!r} is only for models on the hub, and {model} is on this machine")
    if not allow_symlinks and directory not in EMBEDDED.values():
        check_links(directory, made_here=find_own_links(directory))
    return directory


def _is_model(directory: Path) -> bool:
    try:
        return (directory / "config.json").is_file()
    except OSError as error:
        raise ModelError(f"cannot read the directory {directory}: {error.strerror}") from None


def _is_on_hub(model: str) -> bool:
    path = _expand_path(model)
    match = hub.NAME.fullmatch(model)
    return not path.exists() and match is not None and (path.suffix != SUFFIX or match["file"] is not None)


def _resolve(path: Path) -> Path:
    """Return the directory of a model, unpacked if `path` is a GGUF file."""
    return ensure_unpacked(path) if path.suffix == SUFFIX and not path.is_dir() else path


def _expand_path(model: str) -> Path:
    try:
        path = EMBEDDED.get(model) or Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # the path is too long, or "~" cannot be resolved
        raise ModelError(f"no model at {model!r}: {error}") from None
    return path
