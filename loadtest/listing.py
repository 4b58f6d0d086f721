"""What a server says of its models at /v1/models: their names, their cache strategies, how long a text may be.

Knows the answer, and not how to get it. kvmux lists a model once under each strategy ("tiny:paged") when it
is asked to, and marks these entries; for any other server an entry is a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.json import decode

PATH = "/v1/models"
PARAMS = {"strategies": "true"}  # asks kvmux for them; others take no notice


class ListingError(Exception):
    """What was asked for is not listed; the message says what is."""


class Listing(NamedTuple):
    """A model that the server lists."""

    model: str
    owned_by: str  # the server's make, where it says so
    max_model_len: int | None  # tokens of prompt and answer together, where the server says so
    strategies: Mapping[str, str]  # by their names, the model's name under each; empty where there is no choice


class Cache(Struct):
    """Marks a model under a strategy."""

    instance: str


class Meta(Struct):
    """A model's properties as llama.cpp lists them."""

    n_ctx: int | None = None
    n_ctx_train: int | None = None


class Entry(Struct):
    """The fields that are read of a listed model."""

    id: str
    owned_by: str | None = None
    max_model_len: int | None = None
    meta: Meta | None = None
    kv_cache: Cache | None = None


class ModelList(Struct):
    data: list[Entry]


def read_listing(answer: bytes, model: str = "") -> Listing:
    """Return the model of that name, which may name a strategy ("tiny:paged"), or the first.

    Raises ListingError, and ValueError for what is not a list of models at all.
    """
    entries = decode(answer, type=ModelList).data
    models = [entry.id for entry in entries if entry.kv_cache is None]
    if not models:
        raise ListingError("the server lists no model")
    entry = next((entry for entry in entries if entry.id == (model or models[0])), None)
    if entry is None:
        raise ListingError(f"there is no model {model!r}; there are {', '.join(models)}")
    strategies = {
        each.kv_cache.instance: each.id
        for each in entries
        if each.kv_cache and each.id == f"{entry.id}:{each.kv_cache.instance}"
    }
    return Listing(entry.id, entry.owned_by or "", _get_max_model_len(entry), strategies)


def _get_max_model_len(entry: Entry) -> int | None:
    """Return the length of the context as kvmux and vLLM list it, or llama.cpp."""
    meta = entry.meta or Meta()
    return entry.max_model_len or meta.n_ctx or meta.n_ctx_train or None


def select_models(listing: Listing, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the model's name under each strategy and its weight, equal unless given. Raises ListingError."""
    if not listing.strategies:
        if weights:
            raise ListingError(f"the server lists no strategies of {listing.model}: leave them out")
        return {listing.model: 1.0}
    for name in weights:
        if name not in listing.strategies:
            raise ListingError(f"there is no strategy {name!r}; there are {', '.join(listing.strategies)}")
    return {
        listing.strategies[name]: weight for name, weight in (weights or dict.fromkeys(listing.strategies, 1.0)).items()
    }


def parse_weights(text: str) -> dict[str, float]:
    """Parse weights such as "paged=3,contiguous=1,window"; a name alone weighs 1. Raises ValueError."""
    weights = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = part.partition("=")
        weights[name.strip()] = float(weight or 1)
    if weights and not (min(weights.values()) >= 0 < max(weights.values())):
        raise ValueError("weights are 0 or more, one of them more")
    return weights
