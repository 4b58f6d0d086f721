"""Scorers of keys, which say what the strategy `compressed` keeps. Each is one file that implements `base.py`.

A third-party scorer is a package with an entry point in the group `kvmux.kv_scorers` naming a Scorer. Other libraries'
methods are found by "LIBRARY:NAME": a function makes a Scorer of one.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping

from cache_strategies.plugins import list_plugins, load_plugin
from cache_strategies.scorers.base import Scorer

ENTRY_POINT_GROUP = "kvmux.kv_scorers"

BUILTIN: Mapping[str, str] = {
    "expected_attention": "cache_strategies.scorers.expected_attention:ExpectedAttention",
    "h2o": "cache_strategies.scorers.h2o:H2O",
    "keydiff": "cache_strategies.scorers.keydiff:KeyDiff",
    "knorm": "cache_strategies.scorers.knorm:KNorm",
    "lagkv": "cache_strategies.scorers.lagkv:LagKV",
    "r_kv": "cache_strategies.scorers.r_kv:RKV",
    "random": "cache_strategies.scorers.random:RandomScorer",
    "snapkv": "cache_strategies.scorers.snapkv:SnapKV",
    "streaming_llm": "cache_strategies.scorers.streaming_llm:StreamingLLM",
    "tova": "cache_strategies.scorers.tova:TOVA",
}

# of other libraries, by the prefix of their names: functions that return the Scorer of the rest of a name
LIBRARIES: Mapping[str, str] = {"kvpress": "cache_strategies.scorers.kvpress:load_press"}


def list_scorers() -> dict[str, str]:
    """Return all installed scorers by name, as "module:Class"."""
    return list_plugins(ENTRY_POINT_GROUP, BUILTIN)


def load_scorer(name: str) -> type[Scorer]:
    """Return the class of a scorer. Raises SettingsError if it is unknown or cannot be loaded."""
    library, _, rest = name.partition(":")
    if rest and library in LIBRARIES:
        scorer: type[Scorer] = pkgutil.resolve_name(LIBRARIES[library])(rest)
        return scorer
    base: type[Scorer] = Scorer  # type: ignore[type-abstract]
    return load_plugin(name, ENTRY_POINT_GROUP, BUILTIN, base, what="scorer of keys", plural="scorers")
