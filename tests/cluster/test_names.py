"""The names of a prompt's blocks in a router's hint are those that the cache reports for the same blocks."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence

import pytest

from cache_strategies.features import BlockNames
from cache_strategies.types import Salt
from config.block_hashes import NAME_TYPE, BlockNamer
from config.settings import Settings
from server.cluster.hints import HintMaker
from server.cluster.router import Hint, InstanceState
from server.engine.build import Engine, build_engine
from server.engine.ipc.messages import Caching, Hello, SamplingParams, Submit, Tokens
from server.engine.live.routing import describe_routing
from server.models.files.directory import EMBEDDED
from server.processes.engine import make_hello

BLOCK = 16
SETTINGS = {
    "model": str(EMBEDDED["tiny"]),
    "kv_memory": "16MiB",
    "max_seq_len": 512,
    "threads": 1,
    "rollouts_file": "off",
    "strategies": {
        "paged": {"kind": "paged", "block_size": BLOCK},
        "without": {"kind": "paged", "prefix_cache": False},
    },
    "rules": [{"use": "sliding_window", "min_prompt_tokens": 400}],
}


def name_blocks(root: bytes, block_size: int, tokens: Sequence[int], salt: Iterable[object]) -> list[int]:
    """The names of a sequence's full blocks, in order."""
    namer = BlockNamer(root, block_size, salt)
    namer.extend(tokens)
    return namer.names


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(Settings(**SETTINGS))


def submit(engine: Engine, tokens: list[int], *, tenant: str = "", cache_salt: str = "", **fields: object) -> Submit:
    """Run a request to its end, and return its message."""
    caching = Caching(tenant=tenant, cache_salt=cache_salt)
    request_id = f"{random.getrandbits(64):x}"
    message = Submit(request_id, tokens, SamplingParams(max_tokens=1), caching=caching, **fields)  # type: ignore[arg-type]
    assert engine.core.submit(0, message) is None
    while engine.core.busy:
        engine.core.step()
    return message


def make_hint(engine: Engine, message: Submit) -> Hint:
    hint = Hint.from_dict(HintMaker(engine.settings).make(message, make_hello(engine)).fields)
    assert hint is not None
    return hint


def find_names(engine: Engine, instance: str = "paged") -> set[int]:
    return set(InstanceState.from_dict(describe_routing(engine.core)["instances"][instance]).names)


def test_names_of_a_prompt_are_those_of_its_blocks_in_the_cache(engine: Engine, rng: random.Random) -> None:
    for tenant, salt in (("", ""), ("tenant", ""), ("tenant", "salt")):
        tokens = [rng.randrange(200) for _ in range(rng.randrange(3 * BLOCK, 12 * BLOCK))]
        message = submit(engine, tokens, tenant=tenant, cache_salt=salt)
        hint = make_hint(engine, message)
        assert (hint.instance, hint.block_size, hint.num_tokens) == ("paged", BLOCK, len(tokens))
        assert len(hint.names) == len(tokens) // BLOCK
        assert set(hint.names) <= find_names(engine)


def test_names_of_an_answer_are_those_of_its_blocks_in_the_cache(engine: Engine, rng: random.Random) -> None:
    tokens = [rng.randrange(200) for _ in range(3 * BLOCK + 5)]
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    message = Submit(f"{random.getrandbits(64):x}", tokens, sampling)
    hint = HintMaker(engine.settings).make(message, make_hello(engine))
    names = hint.fields["names"]
    assert engine.core.submit(0, message) is None
    while engine.core.busy:
        for event in engine.core.step().events:
            if isinstance(event.message, Tokens):
                hint.add_output(event.message.tokens)
    assert len(names) == (len(tokens) + 40 - 1) // BLOCK, "the last token does not enter the cache"
    assert set(names) <= find_names(engine)


def test_names_differ_by_salt_and_by_all_tokens_before(rng: random.Random) -> None:
    tokens = [rng.randrange(1000) for _ in range(4 * BLOCK)]
    names = list(name_blocks(b"root", BLOCK, tokens, Salt("a")))
    assert not set(names) & set(name_blocks(b"root", BLOCK, tokens, Salt("b")))
    assert not set(names) & set(name_blocks(b"other", BLOCK, tokens, Salt("a")))
    changed = [tokens[0] + 1, *tokens[1:]]
    assert not set(names) & set(name_blocks(b"root", BLOCK, changed, Salt("a")))
    longer = list(name_blocks(b"root", BLOCK, [*tokens, 1, 2], Salt("a")))
    assert longer == names, "the last two tokens fill no block"


def test_cleared_blocks_have_no_names(engine: Engine) -> None:
    submit(engine, list(range(100)))
    cache = engine.core.instances["paged"].strategy
    assert isinstance(cache, BlockNames)
    assert len(cache.list_block_names()) >= 6
    cache.clear()  # type: ignore[attr-defined]
    cache.check_integrity()  # type: ignore[attr-defined]
    assert find_names(engine) == set()


def test_names_of_a_shadow_differ_from_those_of_requests(engine: Engine, rng: random.Random) -> None:
    """Only shadows find a shadow's blocks, so their names differ from those of requests."""
    tokens = [rng.randrange(200) for _ in range(4 * BLOCK)]
    naming = engine.core.instances["paged"].strategy.block_naming()  # type: ignore[attr-defined]
    shadow = set(name_blocks(naming.root, BLOCK, tokens, Salt("", "", True)))
    assert not shadow & set(make_hint(engine, submit(engine, tokens)).names)


def test_only_instances_that_keep_blocks_for_others_share(engine: Engine) -> None:
    statistics = describe_routing(engine.core)
    shares = {name: each["shares"] for name, each in statistics["instances"].items()}
    assert shares == {"paged": True, "without": False, "contiguous": False, "sliding_window": False}
    strategies = {each.name: (each.block_size, each.hash_root) for each in make_hello(engine).strategies}
    assert strategies["paged"][0] == BLOCK
    assert strategies["without"] == strategies["sliding_window"] == (0, b"")
    assert all(each["free_bytes"] > 0 < each["bytes_per_token"] for each in statistics["instances"].values())


def test_the_instance_of_a_hint_is_the_one_that_the_engine_chooses(engine: Engine) -> None:
    named = make_hint(engine, submit(engine, list(range(50)), kv_cache="without"))
    by_rule = make_hint(engine, submit(engine, [1] * 400))
    assert (named.instance, by_rule.instance) == ("without", "sliding_window")
    assert not named.names
    unknown = Submit("x", [1, 2], SamplingParams(max_tokens=1), kv_cache="unknown")
    assert make_hint(engine, unknown).instance is None


def test_prompts_that_may_not_use_cached_blocks_have_no_names(engine: Engine) -> None:
    message = Submit("x", list(range(100)), SamplingParams(max_tokens=1), caching=Caching(max_cached=0))
    assert not make_hint(engine, message).names


def test_the_tokens_of_waiting_prompts_are_reported_as_queued(engine: Engine) -> None:
    message = Submit("waiting", list(range(60)), SamplingParams(max_tokens=4))
    assert engine.core.submit(0, message) is None
    before = describe_routing(engine.core)
    assert (before["queued_tokens"], before["num_requests"]) == (60, 1)
    engine.core.step()
    assert describe_routing(engine.core)["queued_tokens"] == 0
    engine.core.cancel(0, "waiting")
    assert describe_routing(engine.core)["num_requests"] == 0


def test_names_are_numbers_of_32_bits() -> None:
    assert array(NAME_TYPE).itemsize == 4
    assert all(0 <= name < 1 << 32 for name in name_blocks(b"", 1, range(500), ()))


def test_a_hello_lists_all_strategies(engine: Engine) -> None:
    hello = make_hello(engine)
    assert isinstance(hello, Hello)
    assert {each.name for each in hello.strategies} == set(engine.settings.strategies)
