"""The list of models that a server returns at /v1/models: names, cache strategies, length of the context.

Reads the response, and does not send the request. With the query PARAMS, kvmux lists a model once under each strategy
("tiny:paged") and marks these entries; of any other server each entry is a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.json import decode

PATH = "/v1/models"
PARAMS = {"strategies": "true"}  # has kvmux list strategies; other servers ignore it


class ListingError(Exception):
    """The model or strategy that was asked for is not listed; the message names those that are."""


class Listing(NamedTuple):
    """A model that the server lists."""

    model: str
    owned_by: str  # the name of the server's software; empty if it is not reported
    max_model_len: int | None  # tokens of prompt and answer together; None if it is not reported
    strategies: Mapping[str, str]  # the model's name under each strategy, by strategy; empty if there are none


class Cache(Struct):
    """The mark of an entry that is a model under a strategy."""

    instance: str


class Meta(Struct):
    """A model's properties as llama.cpp lists them."""

    n_ctx: int | None = None
    n_ctx_train: int | None = None


class Entry(Struct):
    """The fields of a listed model that are read."""

    id: str
    owned_by: str | None = None
    max_model_len: int | None = None
    meta: Meta | None = None
    kv_cache: Cache | None = None


class ModelList(Struct):
    data: list[Entry]


def read_listing(answer: bytes, model: str = "") -> Listing:
    """Return the model of that name, which may name a strategy ("tiny:paged"); the first one if the name is empty.

    Raises ListingError, and ValueError if the response is not a list of models.
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
    """Return the length of the context, as kvmux and vLLM list it, or as llama.cpp does."""
    meta = entry.meta or Meta()
    return entry.max_model_len or meta.n_ctx or meta.n_ctx_train or None


def select_models(listing: Listing, weights: Mapping[str, float]) -> dict[str, float]:
    """Return weights by the model's name under each strategy; equal weights if none are given. Raises ListingError."""
    if not listing.strategies:
        if weights:
            raise ListingError(f"the server lists no strategies of {listing.model}: leave --strategies out")
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
        raise ValueError("weights have to be 0 or more, and at least one above 0")
    return weights
