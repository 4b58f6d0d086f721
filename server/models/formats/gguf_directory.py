"""Unpacks a GGUF file as a Hugging Face directory. Imports no torch.

Such a file holds config, tokenizer and weights in one. It is unpacked once into a cache, as the small files that a
directory has; the weights stay where they are, behind a link. So only
what reads the weights needs to know GGUF, too. The first process that needs the directory makes it.
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
from server.models.files.atomic_directory import Scratch
from server.models.files.user_cache import user_cache
from server.models.formats.gguf_file import SUFFIX, read_header

FORMAT = "1"  # of what is unpacked; another one when it is to be done anew
FOLDER = "gguf"  # of the user's cache
LINK = f"model{SUFFIX}"  # to the weights


def unpacked(file: Path) -> Path:
    """Return the directory made from a file; its last part is the model's name. Raises ModelError."""
    directory = _place(file)
    try:
        if not directory.is_dir():
            _unpack(file, directory)
    except OSError as error:
        raise ModelError(
            f"cannot unpack {file} to {directory}: {error.strerror}; "
            "set XDG_CACHE_HOME to a directory that can be written"
        ) from None
    return directory


def gguf_of(directory: Path) -> Path | None:
    """Return the GGUF file that a directory was made from; None for other directories."""
    link = directory / LINK
    return link if link.is_symlink() else None


def own_link(directory: Path) -> Path | None:
    """Return the link of a directory that was made here; None for other directories."""
    try:
        folder = (user_cache() / FOLDER).resolve()
    except ModelError:  # there is no cache
        return None
    root = directory.resolve()
    return root / LINK if root.parent.parent == folder else None


def _place(file: Path) -> Path:
    """Return the directory for a file, which is the same until the file changes. Raises ModelError."""
    try:
        file_now = file.stat()
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None
    if not stat.S_ISREG(file_now.st_mode):  # to open a pipe would wait for ever
        raise ModelError(f"cannot read {file}: it is not a file")
    words = (FORMAT, str(file.resolve()), str(file_now.st_size), str(file_now.st_mtime_ns))
    return user_cache() / FOLDER / hashlib.sha256("\0".join(words).encode()).hexdigest()[:16] / file.stem


def _unpack(file: Path, directory: Path) -> None:
    """Make the directory, all of it or nothing, as another process may do the same. Raises ModelError."""
    from server.models.formats.gguf_config import config_of  # here, as other models start sooner without these
    from server.text.gguf_tokenizer import end_tokens_of, tokenizer_of
    from server.text.model_files import library_errors

    header = read_header(file)
    try:
        config = config_of(header)
        parse_config(config, file)
        with library_errors(f"{file}: its tokenizer cannot be made"):
            tokenizer, tokenizer_config = tokenizer_of(header.metadata)
        generation_config = {"eos_token_id": end_tokens_of(header.metadata)}
    except ModelError:
        raise
    except SettingsError as error:
        raise ModelError(f"{file}: {error}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise ModelError(f"{file}: its metadata are damaged: {error!r}") from None
    with closing(Scratch(directory.parent)) as scratch:
        with library_errors(f"{file}: its tokenizer cannot be made"):
            written = tokenizer.to_str(pretty=True)
        (scratch.path / "tokenizer.json").write_text(written, encoding="utf-8")
        for name, values in (
            ("config", config),
            ("generation_config", generation_config),
            ("tokenizer_config", tokenizer_config),
        ):
            text = json.dumps(values, indent=2, ensure_ascii=False)
            (scratch.path / f"{name}.json").write_text(text, encoding="utf-8")
        (scratch.path / LINK).symlink_to(file.resolve())
        scratch.publish(directory)
