"""Reads the list of models that a server returns at /v1/models: names, cache strategies, length of the context.

Does not send the request. With the query `?strategies=true`, kvmux also lists a model under each strategy
("tiny:paged"), in entries with the field `kv_cache`. Every entry of another server is a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.json import decode

PATH = "/v1/models"
PARAMS = {"strategies": "true"}  # query that makes kvmux list strategies; other servers ignore it


class ListingError(Exception):
    """The server does not list the requested model or strategy; the message names those that it lists."""


class Listing(NamedTuple):
    """A model that the server lists, and its names under the cache strategies."""

    model: str
    owned_by: str  # name of the server's software, such as kvmux or vllm; empty if it is not reported
    max_model_len: int | None  # maximum number of tokens of prompt and answer together; None if it is not reported
    strategies: Mapping[str, str]  # model name to request ("tiny:paged") by strategy ("paged"); may be empty


class Cache(Struct):
    """The field `kv_cache` of an entry of the list that is a model under a strategy: the name of the instance."""

    instance: str


class Meta(Struct):
    """A model's context lengths, in tokens, as llama.cpp lists them."""

    n_ctx: int | None = None
    n_ctx_train: int | None = None


class Entry(Struct):
    """The fields that are read from an entry of the list of models."""

    id: str
    owned_by: str | None = None
    max_model_len: int | None = None
    meta: Meta | None = None
    kv_cache: Cache | None = None


class ModelList(Struct):
    data: list[Entry]


def read_listing(answer: bytes, model: str = "") -> Listing:
    """Return the model named `model` from the server's response; the first model if the name is empty.

    The name may include a strategy ("tiny:paged"). Raises ListingError if no such model is listed, and ValueError if
    the response is not a list of models.
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
    """Return the length of a model's context in tokens, from the field of kvmux and vLLM or those of llama.cpp."""
    meta = entry.meta or Meta()
    return entry.max_model_len or meta.n_ctx or meta.n_ctx_train or None


def select_models(listing: Listing, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weight of each model name to request ("tiny:paged"), given `weights` by strategy ("paged").

    Without `weights`, all listed strategies have equal ones. Raises ListingError for a strategy that is not listed.
    """
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
    """Parse weights such as "paged=3,contiguous=1,window"; a name alone has the weight 1.

    Raises ValueError if a weight is not a number from 0, or if all are 0.
    """
    weights = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = part.partition("=")
        weights[name.strip()] = float(weight or 1)
    if weights and not (min(weights.values()) >= 0 < max(weights.values())):
        raise ValueError("weights have to be 0 or more, and at least one above 0")
    return weights
