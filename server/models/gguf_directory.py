"""A GGUF file as a Hugging Face directory. Imports no torch.

Such a file holds config, tokenizer and weights in one. It is unpacked once into a cache, as the small files that a
directory has; the weights stay where they are, behind a link. So nothing else in the server needs to know GGUF but what
reads the weights. Whoever comes first unpacks.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from pathlib import Path

from config.errors import SettingsError
from server.models.config_file import checked
from server.models.errors import ModelError
from server.models.gguf_file import SUFFIX, read_header
from server.models.scratch import Scratch
from server.models.user_cache import user_cache

FORMAT = "1"  # of what is unpacked; another one when it is to be done anew
LINK = f"model{SUFFIX}"  # to the weights


def unpacked(file: Path) -> Path:
    """The directory made from a file; its last part is the model's name. Raises ModelError."""
    directory = _place(file)
    if not directory.is_dir():
        try:
            _unpack(file, directory)
        except OSError as error:
            if not directory.is_dir():  # nor could another process
                raise ModelError(
                    f"cannot unpack {file} to {directory}: {error.strerror}; "
                    "set XDG_CACHE_HOME to a directory that can be written"
                ) from None
    return directory


def gguf_of(directory: Path) -> Path | None:
    """The GGUF file that a directory was made from."""
    link = directory / LINK
    return link if link.is_symlink() else None


def _place(file: Path) -> Path:
    """The same for the same file until it changes."""
    try:
        file_now = file.stat()
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None
    words = (FORMAT, str(file.resolve()), str(file_now.st_size), str(file_now.st_mtime_ns))
    return user_cache() / "gguf" / hashlib.sha256("\0".join(words).encode()).hexdigest()[:16] / file.stem


def _unpack(file: Path, directory: Path) -> None:
    """All or nothing: another process may do the same."""
    from server.models.gguf_config import config_of  # here, as other models start sooner without these
    from server.text.gguf_tokenizer import end_tokens_of, tokenizer_of

    header = read_header(file)
    try:
        config = config_of(header)
        checked(config, file)
        tokenizer, tokenizer_config = tokenizer_of(header.metadata)
        generation_config = {"eos_token_id": end_tokens_of(header.metadata)}
    except ModelError:
        raise
    except SettingsError as error:
        raise ModelError(f"{file}: {error}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise ModelError(f"{file}: its metadata are damaged: {error!r}") from None
    with closing(Scratch(directory.parent)) as scratch:
        tokenizer.save(str(scratch.path / "tokenizer.json"))
        for name, values in (
            ("config", config),
            ("generation_config", generation_config),
            ("tokenizer_config", tokenizer_config),
        ):
            text = json.dumps(values, indent=2, ensure_ascii=False)
            (scratch.path / f"{name}.json").write_text(text, encoding="utf-8")
        (scratch.path / LINK).symlink_to(file.resolve())
        scratch.publish(directory)
