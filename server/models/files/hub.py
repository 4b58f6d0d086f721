"""Downloads a model's files from the Hugging Face hub, unless they are in its cache.

The cache, the token, the endpoint and the offline switch are those of huggingface_hub (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE). Does not read the files.
"""

from __future__ import annotations

import re
from pathlib import Path

from server.models.errors import ModelError, first_line

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)  # owner/name
ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# Files in subfolders (other formats), and the second copy of Mistral's weights
IGNORE_PATTERNS = ["*/*", "consolidated*"]


def fetch_model(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model's files; files that are not in the cache are downloaded, with a progress bar.

    Raises ModelError if that fails.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=ALLOW_PATTERNS, ignore_patterns=IGNORE_PATTERNS)
        )
    except GatedRepoError:
        raise ModelError(f"{model} asks you to accept its terms: do so on its page, then set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise ModelError(f"{model} has no revision {revision!r}: give a branch, a tag or a commit of it") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"no model {model!r}, neither on this machine nor on the hub; if it is private, set HF_TOKEN"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:  # hub or network down, disk full, or offline mode set
        raise ModelError(f"{model} is not on this machine, and cannot be downloaded: {first_line(error)}") from None
