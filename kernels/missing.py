"""Why operations that are written for a device cannot be had on this machine. Knows no device."""

from __future__ import annotations


class KernelsMissing(Exception):
    """There are no such operations on this machine; the message says why, and what would help."""
