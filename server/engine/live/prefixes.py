"""Describes the cached prefixes of all instances, for GET /v1/live/prefixes: trees of tokens that requests may reuse.

Has neither texts nor token ids. It is computed only for a client that looks at it.
"""

from __future__ import annotations

from time import time
from typing import Any

from cache_strategies.features import PrefixListing
from cache_strategies.types import CachedPrefix
from server.engine.core import Core
from server.engine.info import drop_none, round_seconds
from server.engine.instance import Instance
from server.engine.instance_reports import list_prefixes

MAX_LISTED_PREFIXES = 500  # maximum number of nodes that are listed of an instance


def describe_prefixes(core: Core) -> dict[str, Any]:
    """Return the trees of cached prefixes of all instances that can list them.

    docs/operations/administration.md describes them.
    """
    instances = {
        name: _describe_tree(instance)
        for name, instance in core.instances.items()
        if isinstance(instance.strategy, PrefixListing)
    }
    return {"object": "prefixes", "created": round(time(), 3), "instances": instances}


def _describe_tree(instance: Instance) -> dict[str, Any]:
    prefixes, omitted = list_prefixes(instance, MAX_LISTED_PREFIXES)
    return {"prefixes": [_describe_prefix(each) for each in prefixes], "omitted": omitted}


def _describe_prefix(prefix: CachedPrefix) -> dict[str, Any]:
    """Return a node of a tree; what is not known or has no value is left out."""
    fields = {
        "id": prefix.id,
        "parent": prefix.parent,
        "tenant": prefix.salt.tenant or None,
        "cache_salt": prefix.salt.cache_salt or None,
        "shadow": prefix.salt.shadow or None,
        "first_token": prefix.first_token,
        "tokens": prefix.num_tokens,
        "bytes": prefix.num_bytes,
        "references": prefix.references,
        "hits": prefix.hits,
        "age_seconds": round_seconds(prefix.age),
        "idle_seconds": round_seconds(prefix.idle),
        "pins": prefix.pins,
    }
    return drop_none(fields)
