"""The user's directories: for files that can be made again and may be deleted at any time (cache), and for state.

Imports no torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from server.models.errors import ModelError


def user_cache_dir() -> Path:
    """Return kvmux's cache folder, which may not exist yet. Raises ModelError if this user has no home directory."""
    return expand_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "kvmux"


def user_state_dir() -> Path:
    """Return kvmux's folder for state that outlives a server, which may not exist yet; raises ModelError likewise."""
    return expand_user(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "kvmux"


def expand_user(path: str) -> Path:
    """Return a path with "~" replaced by a home directory. Raises ModelError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ModelError(f"{path}: this user has no home directory: set HOME, or XDG_CACHE_HOME") from None
