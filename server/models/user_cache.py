"""Where files lie that can be made anew: they may be deleted at any time. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """The project's folder, which may not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvmux"
