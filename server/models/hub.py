"""Where a model's files are: embedded, on disk, or on the Hugging Face hub, from where they are fetched once.

The cache, the token, the endpoint and the offline switch are those of huggingface_hub (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE). Runs before any process is started, so that they all find files. Knows no config and no weights.
"""

from __future__ import annotations

import re
from pathlib import Path

from config.settings import Settings
from server.models.config import EMBEDDED, ModelError

NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)  # owner/name
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
UNWANTED = ["*/*"]  # folders hold other formats


def located(settings: Settings) -> Settings:
    """The settings with the model's path in place of its name, and the name clients know it by. Raises ModelError."""
    path = locate(settings.model, settings.revision)
    on_hub = settings.model not in EMBEDDED and not Path(settings.model).expanduser().exists()
    name = settings.model if on_hub else path.stem if path.is_file() else path.resolve().name
    return settings.model_copy(update={"model": str(path), "model_name": settings.model_name or name})


def locate(model: str, revision: str | None = None) -> Path:
    """A directory or a file, fetched if need be, with a progress bar. Raises ModelError."""
    path = EMBEDDED.get(model, Path(model).expanduser())
    if path.exists():
        if revision is not None:
            raise ModelError(f"revision {revision!r} is for a model on the hub, and {model} is on this machine")
        return path
    if NAME.fullmatch(model) is None:
        raise ModelError(
            f"no model at {model!r}: give a directory with config.json, tokenizer.json and *.safetensors, "
            f"a name on the Hugging Face hub (owner/name), or an embedded model ({', '.join(EMBEDDED)})"
        )
    return _fetched(model, revision)


def _fetched(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except GatedRepoError:
        raise ModelError(f"{model} asks you to accept its terms: do so on its page, then set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise ModelError(f"{model} has no revision {revision!r}: give a branch, a tag or a commit of it") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"no model {model!r}, neither on this machine nor on the hub; if it is private, set HF_TOKEN"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:  # the hub is down, the network, the disk, offline
        raise ModelError(f"{model} is not on this machine, and cannot be fetched: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
