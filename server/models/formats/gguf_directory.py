"""Unpacks a GGUF file's config and tokenizer into a directory like those of Hugging Face. Imports no torch.

The directory is made once, in the user's cache, by the first process that needs it. A link in it leads to the GGUF
file, or one to each of its parts, from which the weights are read; all other readers need not know GGUF.
"""

from __future__ import annotations

import hashlib
import json
import stat
from contextlib import closing
from pathlib import Path

from config.errors import SettingsError
from server.models.config import parse_config
from server.models.errors import ModelError
from server.models.files.atomic_directory import AtomicDirectory
from server.models.files.user_cache import user_cache_dir
from server.models.formats.gguf_file import PART, SUFFIX, list_parts, read_header

FORMAT = "3"  # version of the unpacked files; change it to have all files unpacked again
FOLDER = "gguf"  # name of the folder in the user's cache with the directories of all unpacked files
LINK = f"model{SUFFIX}"  # name of the link to the GGUF file in its unpacked directory
PART_LINKS = f"model-*{SUFFIX}"  # those of the links to its parts


def ensure_unpacked(file: Path) -> Path:
    """Return the directory made from a GGUF file, unpacked if necessary; the last part of its path is the model's name.

    Raises ModelError if the file cannot be read or the directory cannot be written.
    """
    directory = _get_directory(file)
    try:
        if not directory.is_dir():
            _unpack(file, directory)
    except OSError as error:
        raise ModelError(
            f"cannot unpack {file} to {directory}: {error.strerror}; "
            "set XDG_CACHE_HOME to a directory that can be written"
        ) from None
    return directory


def find_gguf_file(directory: Path) -> Path | None:
    """Return the link to the GGUF file, or to its first part, in a directory made of it; None for other directories."""
    return next((link for link in _list_links(directory) if link.is_symlink()), None)


def find_own_links(directory: Path) -> list[Path]:
    """Return the links to GGUF files in a directory that this module made; [] for other directories."""
    try:
        folder = (user_cache_dir() / FOLDER).resolve()
    except ModelError:  # this user has no cache directory
        return []
    root = directory.resolve()
    return _list_links(root) if root.parent.parent == folder else []


def _list_links(directory: Path) -> list[Path]:
    return [directory / LINK, *sorted(directory.glob(PART_LINKS))]


def _get_directory(file: Path) -> Path:
    """Return the directory for a GGUF file in its present state. Raises ModelError if a part is no readable file."""
    words = [FORMAT]
    for part in list_parts(file):
        try:
            status = part.stat()
        except OSError as error:
            raise ModelError(f"cannot read {part}: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):  # a pipe, for example: opening it would block for ever
            raise ModelError(f"cannot read {part}: it is not a file")
        words += [str(part.resolve()), str(status.st_size), str(status.st_mtime_ns)]
    name = PART.sub(r"\g<name>", file.name).removesuffix(SUFFIX)
    return user_cache_dir() / FOLDER / hashlib.sha256("\0".join(words).encode()).hexdigest()[:16] / name


def _unpack(file: Path, directory: Path) -> None:
    """Make the directory atomically, as another process may make it, too. Raises ModelError for invalid metadata."""
    from server.models.formats.gguf_config import make_config  # imported here, so that other models start faster
    from server.text.gguf_tokenizer import find_end_tokens, make_tokenizer
    from server.text.model_files import convert_library_errors

    header = read_header(file)
    try:
        config = make_config(header)
        parse_config(config, file)
        with convert_library_errors(f"{file}: its tokenizer cannot be made"):
            tokenizer, tokenizer_config = make_tokenizer(header.metadata)
        generation_config = {"eos_token_id": find_end_tokens(header.metadata)}
    except ModelError:
        raise
    except SettingsError as error:
        raise ModelError(f"{file}: {error}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise ModelError(f"{file}: its metadata is damaged: {error!r}") from None
    with closing(AtomicDirectory(directory.parent)) as scratch:
        with convert_library_errors(f"{file}: its tokenizer cannot be made"):
            written = tokenizer.to_str(pretty=True)
        (scratch.path / "tokenizer.json").write_text(written, encoding="utf-8")
        for name, values in (
            ("config", config),
            ("generation_config", generation_config),
            ("tokenizer_config", tokenizer_config),
        ):
            text = json.dumps(values, indent=2, ensure_ascii=False)
            (scratch.path / f"{name}.json").write_text(text, encoding="utf-8")
        parts = list_parts(file)
        for i, part in enumerate(parts, 1):
            name = LINK if len(parts) == 1 else f"model-{i:05}-of-{len(parts):05}{SUFFIX}"
            (scratch.path / name).symlink_to(part.resolve())
        scratch.publish(directory)
