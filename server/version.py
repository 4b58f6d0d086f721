"""The installed version of kvmux."""

from __future__ import annotations

from importlib import metadata


def get_version() -> str:
    try:
        return metadata.version("kvmux")
    except metadata.PackageNotFoundError:
        return "(not installed)"
