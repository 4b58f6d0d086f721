"""Reading lists of models, from kvmux and from other servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.listing import Listing, ListingError, parse_weights, select_models
from loadtest.listing import read_listing as read_bytes


def entry(name: str, strategy: str = "", **more: Any) -> dict[str, Any]:
    return {"id": name, **more} | ({"kv_cache": {"instance": strategy}} if strategy else {})


OURS = {
    "data": [
        entry("tiny", owned_by="kvmux", max_model_len=2048),
        entry("tiny:paged", "paged"),
        entry("tiny:short", "short"),
        entry("alias"),
        entry("alias:paged", "paged"),
    ]
}
OTHERS = {"data": [entry("llama3:8b", owned_by="vllm"), entry("qwen:7b", meta={"n_ctx_train": 512})]}


def read_listing(answer: dict[str, Any], model: str = "") -> Listing:
    return read_bytes(json.dumps(answer).encode(), model)


def test_a_model_and_its_strategies() -> None:
    listing = read_listing(OURS)
    assert listing == ("tiny", "kvmux", 2048, {"paged": "tiny:paged", "short": "tiny:short"})
    assert read_listing(OURS, "alias").strategies == {"paged": "alias:paged"}
    assert read_listing(OURS, "tiny:short")[3] == {}  # it is one itself
    assert select_models(listing, {}) == {"tiny:paged": 1, "tiny:short": 1}
    assert select_models(listing, {"short": 2.5}) == {"tiny:short": 2.5}


def test_a_colon_in_a_name_is_no_strategy() -> None:
    assert read_listing(OTHERS) == ("llama3:8b", "vllm", None, {})
    assert read_listing(OTHERS, "qwen:7b").max_model_len == 512
    assert select_models(read_listing(OTHERS), {}) == {"llama3:8b": 1}


@pytest.mark.parametrize(
    ("answer", "model", "weights", "message"),
    [
        (OURS, "big", {}, "there is no model 'big'; there are tiny, alias"),
        (OURS, "", {"pagd": 1.0}, "there is no strategy 'pagd'; there are paged, short"),
        (OTHERS, "", {"paged": 1.0}, "the server lists no strategies of llama3:8b"),
        ({"data": []}, "", {}, "the server lists no model"),
    ],
)
def test_what_is_not_listed(answer: Any, model: str, weights: dict[str, float], message: str) -> None:
    with pytest.raises(ListingError, match=message):
        select_models(read_listing(answer, model), weights)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"data": None},
        {"data": ["tiny"]},
        {"data": [{"id": 5}]},
        {"data": [{}]},
        {"data": [entry("tiny", max_model_len=float("inf"))]},
        {"data": [entry("tiny", meta=[1])]},
        {"data": [entry("tiny", kv_cache="paged")]},
        {"data": [entry("\ud800")]},
    ],
)
def test_what_is_no_list_of_models(answer: Any) -> None:
    with pytest.raises(ValueError):
        read_listing(answer)


def test_null_is_nothing() -> None:
    nothing = dict.fromkeys(("owned_by", "max_model_len", "meta", "kv_cache"))
    assert read_listing({"data": [entry("tiny", **nothing)]}) == ("tiny", "", None, {})


def test_weights() -> None:
    assert parse_weights("") == {}
    assert parse_weights("paged=3, contiguous=0.5,window") == {"paged": 3, "contiguous": 0.5, "window": 1}
    for wrong in ("paged=-1", "paged=0", "paged=x"):
        with pytest.raises(ValueError):
            parse_weights(wrong)
