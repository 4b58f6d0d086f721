"""Downloads a model's files from the Hugging Face hub, unless they are in its cache.

The cache, the token, the endpoint and the offline switch are those of huggingface_hub (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE). Does not read the files.
"""

from __future__ import annotations

import re
from pathlib import Path

from server.models.errors import ModelError, first_line
from server.models.formats.gguf_file import SUFFIX, list_parts

# owner/name, or owner/name:Q4_K_M for the GGUF file of a type, or owner/name:FILE.gguf
NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(:(?P<file>\w[\w.-]*))?", re.ASCII)
ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# Files in subfolders (other formats), and the second copy of Mistral's weights
IGNORE_PATTERNS = ["*/*", "consolidated*"]


def fetch_model(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model's files, or one of its GGUF files; what is not in the cache is downloaded.

    Raises ModelError if that fails, or if not exactly one GGUF file has the name that was given.
    """
    match = NAME.fullmatch(model)
    assert match is not None, "the caller has checked that it is a name on the hub"
    repo, file = match["repo"], match["file"]
    if file is None:
        return _download(repo, revision, ALLOW_PATTERNS, IGNORE_PATTERNS)
    words = {file, file.lower(), file.upper()}
    directory = _download(repo, revision, [f"*{word}*" for word in words], ["*mmproj*"])
    return _choose_gguf_file(repo, directory, file)


def find_name(directory: Path) -> str | None:
    """Return owner/name of a directory models--OWNER--NAME/snapshots/REVISION of the cache; None for others."""
    kind, *names = directory.parent.parent.name.split("--")
    return "/".join(names) if kind == "models" and names and directory.parent.name == "snapshots" else None


def _choose_gguf_file(repo: str, directory: Path, wanted: str) -> Path:
    """Return the file whose name is `wanted`, or has it as a word: the first part, if it is in several."""
    word = re.compile(rf"(^|[-._/]){re.escape(wanted.removesuffix(SUFFIX))}([-./]|$)", re.IGNORECASE)
    there = sorted(path for path in directory.rglob(f"*{SUFFIX}") if word.search(str(path.relative_to(directory))))
    firsts = dict.fromkeys(list_parts(path)[0] for path in there)
    if len(firsts) == 1:
        return next(iter(firsts))
    if firsts:
        names = ", ".join(path.name for path in firsts)
        raise ModelError(f"{repo} has several GGUF files of {wanted}: give the name of one, as {repo}:{names}")
    raise ModelError(f"{repo} has no GGUF file of {wanted}: look up its files on the hub, and give {repo}:TYPE")


def _download(repo: str, revision: str | None, allowed: list[str], ignored: list[str]) -> Path:
    """Return the directory of a repository's files, downloaded with a progress bar. Raises ModelError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=allowed, ignore_patterns=ignored))
    except GatedRepoError:
        raise ModelError(f"{repo} asks you to accept its terms: do so on its page, then set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise ModelError(f"{repo} has no revision {revision!r}: give a branch, a tag or a commit of it") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"no model {repo!r}, neither on this machine nor on the hub; if it is private, set HF_TOKEN"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:  # hub or network down, disk full, or offline mode set
        raise ModelError(f"{repo} is not on this machine, and cannot be downloaded: {first_line(error)}") from None
