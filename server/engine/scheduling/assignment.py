"""Assigns conversations to the arms of a roll-out, and requests to its shadow, by hashes. Keeps no state.

A conversation has the same number from 0 to 1 in every stage, process and restart. It is served by the candidate if the
number is below the share, so it stays with the candidate as the share grows.
"""

from __future__ import annotations

import hashlib


def compute_position(purpose: str, rollout: str, key: str) -> float:
    """Return a number from 0 to below 1, evenly distributed over keys; other purposes and roll-outs give others."""
    text = "\0".join((purpose, rollout, key)).encode(errors="surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # 53 bits: a float below 1 without rounding


def is_canary(rollout: str, conversation: str, share: float) -> bool:
    """Return whether the candidate of a roll-out serves a conversation, at a share from 0 to 1."""
    return compute_position("canary", rollout, conversation) < share


def is_shadowed(rollout: str, request: str, share: float) -> bool:
    """Return whether a request also runs under the candidate, at a share from 0 to 1. Independent of `is_canary`."""
    return compute_position("shadow", rollout, request) < share
