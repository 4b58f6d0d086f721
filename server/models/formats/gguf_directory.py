"""Unpacks a GGUF file as a Hugging Face directory. Imports no torch.

Such a file holds config, tokenizer and weights in one. It is unpacked once into a cache, as the small files that a
directory has; the weights stay where they are, behind a link. So only what reads the weights needs to know GGUF, too.
The first process that needs the directory makes it.
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
from server.models.formats.gguf_file import SUFFIX, read_header

FORMAT = "1"  # of what is unpacked; another one when it is to be done anew
FOLDER = "gguf"  # of the user's cache
LINK = f"model{SUFFIX}"  # to the weights


def ensure_unpacked(file: Path) -> Path:
    """Return the directory made from a file; its last part is the model's name. Raises ModelError."""
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
    """Return the GGUF file that a directory was made from; None for other directories."""
    link = directory / LINK
    return link if link.is_symlink() else None


def find_own_link(directory: Path) -> Path | None:
    """Return the link of a directory that was made here; None for other directories."""
    try:
        folder = (user_cache_dir() / FOLDER).resolve()
    except ModelError:  # there is no cache
        return None
    root = directory.resolve()
    return root / LINK if root.parent.parent == folder else None


def _get_directory(file: Path) -> Path:
    """Return the directory for a file, which is the same until the file changes. Raises ModelError."""
    try:
        status = file.stat()
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
        raise ModelError(f"cannot read {file}: it is not a file")
    parts = (FORMAT, str(file.resolve()), str(status.st_size), str(status.st_mtime_ns))
    return user_cache_dir() / FOLDER / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16] / file.stem


def _unpack(file: Path, directory: Path) -> None:
    """Make the directory, all of it or nothing, as another process may do the same. Raises ModelError."""
    from server.models.formats.gguf_config import make_config  # here, as other models start sooner without these
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
        raise ModelError(f"{file}: its metadata are damaged: {error!r}") from None
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
        (scratch.path / LINK).symlink_to(file.resolve())
        scratch.publish(directory)
