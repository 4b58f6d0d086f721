"""The tree of cached prefixes is what a simple model says after any operations; its nodes can be pinned and dropped."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from cache_strategies.base import KVCache
from cache_strategies.block_hashes import BlockHash
from cache_strategies.features import PrefixListing
from cache_strategies.paged.cache import PagedCache, PagedSequence
from cache_strategies.types import NO_SALT, CachedPrefix, PinError, Salt, Text
from kernels.types import LayerSpec
from tests.cache_strategies.cache_driver import (
    BLOCK,
    LAYER,
    assert_nothing_leaked,
    count_bytes,
    enter,
    evict,
    find_cached,
    get_block_bytes,
    make_cache,
    make_paged,
    open_sequence,
    read_prompt,
)

EVERY_NODE = 2**31
WINDOW = LayerSpec(1, 1, 4, 4, window=6)
TEXT = list(range(10, 26))  # four blocks of 4
LONGEST = 60
SALTS = (NO_SALT, Salt("tenant"), Salt("tenant", "salt"))

Prefix = tuple[Salt, tuple[int, ...]]  # its salt and its tokens


def list_nodes(cache: KVCache, limit: int = EVERY_NODE) -> list[CachedPrefix]:
    assert isinstance(cache, PrefixListing)
    return list(cache.list_prefixes(limit)[0])


def shapes_of(nodes: Sequence[CachedPrefix]) -> list[tuple[int, int, int, int]]:
    """Return (first token, number of tokens, references, hits) of each node, sorted."""
    return sorted((each.first_token, each.num_tokens, each.references, each.hits) for each in nodes)


def id_of(cache: PagedCache, tokens: Sequence[int], salt: Salt = NO_SALT) -> str:
    """Return the id of a text of whole blocks."""
    *_, last = cache.hasher.hash_blocks(tokens, salt)
    return last.prefix_id


# ---------------------------------------------------------------- any operations
class Model:
    """Does random operations with a cache, and knows by brute force what its tree must be."""

    def __init__(self, cache: PagedCache, rng: random.Random, *, counts_hits: bool) -> None:
        self.cache, self.rng, self.counts_hits = cache, rng, counts_hits
        self.sequences: list[tuple[PagedSequence, Salt, list[int]]] = []  # with all tokens that it may hold
        self.texts: list[tuple[int, ...]] = [(1,) * LONGEST]
        self.pins: dict[str, Prefix] = {}
        self.hits: Counter[Prefix] = Counter()  # that ended with a prefix
        self.num_refused = 0

    # ------------------------------------------------------------ the truth
    def hash_of(self, prefix: Prefix) -> BlockHash:
        salt, tokens = prefix
        *_, last = self.cache.hasher.hash_blocks(tokens, salt)
        return last

    def list_cached(self) -> list[Prefix]:
        """Return all cached prefixes of all texts, the shortest first."""
        found = {
            prefix
            for text in self.texts
            for end in range(BLOCK, len(text) + 1, BLOCK)
            for salt in SALTS
            if self.cache.pool.find(self.hash_of(prefix := (salt, text[:end]))) is not None
        }
        return sorted(found, key=lambda prefix: len(prefix[1]))

    def count_bytes(self, prefix: Prefix) -> int:
        hashes = (self.hash_of(prefix)._replace(group=group) for group in range(len(self.cache.layout.groups)))
        blocks = [block for each in hashes if (block := self.cache.pool.find(each)) is not None]
        by_region = self.cache.pool.list_by_region(blocks)
        return sum(region.size * len(numbers) for region, numbers in by_region.items())

    def list_expected(self) -> list[tuple[object, ...]]:
        """Return the nodes: prefixes after which sequences differ, a pin ends, or the numbers of uses change."""
        cached = self.list_cached()
        references = Counter(block for sequence, _, _ in self.sequences for block in sequence.blocks)
        uses: dict[Prefix, tuple[int, int]] = {}
        for salt, tokens in cached:
            block = self.cache.pool.find(self.hash_of((salt, tokens)))
            assert block is not None
            longer = [other for other in cached if other[0] == salt and other[1][: len(tokens)] == tokens]
            uses[salt, tokens] = references[block], sum(self.count_hits(each) for each in longer)

        def continues(prefix: Prefix) -> Prefix | None:
            """Return the prefix that is one block longer and in the same node."""
            salt, tokens = prefix
            longer = [p for p in cached if p[0] == salt and p[1][:-BLOCK] == tokens]
            alone = len(longer) == 1 and prefix not in self.pins.values() and uses[longer[0]] == uses[prefix]
            return longer[0] if alone else None

        found: list[tuple[object, ...]] = []
        for salt, tokens in cached:
            end: Prefix = salt, tokens
            before: Prefix = salt, tokens[:-BLOCK]
            if before in uses and continues(before) is not None:
                continue  # it is within a node
            num_bytes = self.count_bytes(end)
            while (longer := continues(end)) is not None:
                end = longer
                num_bytes += self.count_bytes(end)
            parent = self.hash_of(before).prefix_id if before in uses else None
            pins = sorted(pin for pin, prefix in self.pins.items() if prefix == end)
            size = len(end[1]) - len(before[1])
            found.append((self.hash_of(end).prefix_id, parent, salt, len(before[1]), size, num_bytes, *uses[end], pins))
        return sorted(found, key=str)

    def count_hits(self, prefix: Prefix) -> int:
        return self.hits[prefix] if self.counts_hits else self.cache.pool.count_hits(self.hash_of(prefix))

    # ------------------------------------------------------------ operations
    def do_anything(self) -> None:
        before = self.list_cached()
        self.rng.choice([self.open, self.open, self.open, self.go_on, self.close, self.evict, self.pin, self.drop])()
        self.cache.poll()
        self.pins = {pin.id: self.pins[pin.id] for pin in self.cache.pins()}
        now = set(self.list_cached())
        for salt, tokens in reversed(before):  # what is gone leaves its hits to the prefix before it
            if (salt, tokens) not in now:
                hits = self.hits.pop((salt, tokens), 0)
                if tokens[:-BLOCK]:
                    self.hits[salt, tokens[:-BLOCK]] += hits

    def open(self) -> None:
        known = self.rng.choice(self.texts[-6:])
        text = [*known[: self.rng.randrange(len(known))], *self.rng.choices([1, 2], k=self.rng.randint(1, 12))][:50]
        salt = self.rng.choice(SALTS)
        sequence = self.cache.open(Text(text, salt=salt))
        self.texts.append(tuple(text))
        if sequence is None:
            self.num_refused += 1
            return
        if sequence.length:
            self.hits[salt, tuple(text[: sequence.length])] += 1
        self.sequences.append((sequence, salt, text))
        if self.rng.random() < 0.8:
            self.compute(len(self.sequences) - 1)

    def go_on(self) -> None:
        if self.sequences:
            self.compute(self.rng.randrange(len(self.sequences)))

    def compute(self, number: int) -> None:
        """Compute the rest of a prompt, or two further tokens."""
        sequence, _, text = self.sequences[number]
        rest = text[sequence.length :] or self.rng.choices([1, 2], k=min(2, LONGEST - len(text)))
        if rest and sequence.ready() and sequence.reserve(len(rest)):
            text[sequence.length :] = rest
            enter(self.cache, (sequence, rest))
            self.texts.append(tuple(text))

    def close(self) -> None:
        if self.sequences:
            self.sequences.pop(self.rng.randrange(len(self.sequences)))[0].close()

    def evict(self) -> None:
        evict(self.cache, self.rng.randint(1, 4))

    def pin(self) -> None:
        nodes = list_nodes(self.cache)
        if nodes and self.rng.random() < 0.7:
            ids = {self.hash_of(prefix).prefix_id: prefix for prefix in self.list_cached()}
            salt, tokens = ids[self.rng.choice(nodes).id]
            try:
                pin = self.cache.pin_prefix(self.hash_of((salt, tokens)).prefix_id, ttl=1e9)
            except PinError:
                return
            self.pins[pin.id] = salt, tokens[: pin.num_tokens]
        elif self.pins:
            self.cache.unpin(self.rng.choice(list(self.pins)))

    def drop(self) -> None:
        if not (nodes := list_nodes(self.cache)) or self.rng.random() < 0.5:
            return
        top = self.rng.choice(nodes)
        ids = {self.hash_of(prefix).prefix_id: prefix for prefix in self.list_cached()}
        salt, tokens = ids[top.id]
        first = tokens[: top.first_token + BLOCK]  # up to the first block of the node
        before = self.list_cached()
        dropped: set[Prefix] = {(salt, first)}
        for each in before:  # not what follows after blocks that are gone: it is a tree of its own
            if (each[0], each[1][:-BLOCK]) in dropped:
                dropped.add(each)
        pins = {pin_id for pin_id, prefix in self.pins.items() if prefix not in dropped}
        assert self.cache.drop_prefix(top.id) is not None
        assert set(self.list_cached()) == {*before} - dropped
        assert {pin.id for pin in self.cache.pins()} == pins


@pytest.mark.fuzz
@pytest.mark.parametrize("layers", [[LAYER], [LAYER, WINDOW, LAYER]], ids=["one group", "hybrid"])
@pytest.mark.parametrize("blocks", [45, 200])
def test_any_operations_lead_to_the_tree_of_the_model(layers: Sequence[LayerSpec], blocks: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for number in range(2):
        cache = make_paged(blocks=blocks * len(layers), seats=5, layers=layers)
        model = Model(cache, random.Random(seed + number), counts_hits=len(layers) == 1)
        for _ in range(50):
            model.do_anything()
            cache.check_integrity()
            nodes = list_nodes(cache)
            found = [(*each[:8], sorted(each.pins)) for each in nodes]
            assert sorted(found, key=str) == model.list_expected()
            places = {each.id: place for place, each in enumerate(nodes)}
            assert all(each.parent is None or places[each.parent] < places[each.id] for each in nodes)
        for sequence, *_ in model.sequences:
            sequence.close()
        for pin in cache.pins():
            cache.unpin(pin.id)
        assert_nothing_leaked(cache)
        assert list_nodes(cache) == []


@pytest.mark.fuzz
def test_hits_are_the_sequences_that_found_a_node_while_nothing_is_evicted() -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    cache = make_paged(blocks=2000, seats=4)
    found: list[tuple[int, ...]] = []
    texts: list[list[int]] = [[1] * 40]
    for _ in range(60):
        text = [*rng.choice(texts)[: rng.randrange(30)], *rng.choices(range(3), k=10)]
        sequence = read_prompt(cache, text)
        found.append(tuple(text[: sequence.found]))
        texts.append(text)
        sequence.close()
    expected = {
        id_of(cache, text[:end]): sum(each[:end] == tuple(text[:end]) for each in found)
        for text in texts[1:]
        for end in range(BLOCK, len(text) + 1, BLOCK)
    }
    nodes = list_nodes(cache)
    assert {each.id: each.hits for each in nodes} == {each.id: expected[each.id] for each in nodes}
    assert max(each.hits for each in nodes) > 1


# ---------------------------------------------------------------- nodes
@pytest.mark.parametrize("kind", ["paged", "quest"])
def test_a_common_beginning_is_the_parent_of_both_ends(kind: str) -> None:
    cache = make_cache(kind, block_size=4)
    block_bytes = count_bytes(cache, 4)
    first = read_prompt(cache, [*TEXT, *range(30, 39)])
    (alone,) = list_nodes(cache)
    assert (alone.parent, alone.first_token, alone.num_tokens, alone.references, alone.hits) == (None, 0, 24, 1, 0)
    assert alone.num_bytes == 6 * block_bytes
    second = read_prompt(cache, [*TEXT, *range(40, 45)])
    parent, *children = list_nodes(cache)
    assert (parent.num_tokens, parent.references, parent.hits, parent.idle) == (16, 2, 1, None)
    assert {each.parent for each in children} == {parent.id}
    assert shapes_of(children) == [(16, 4, 1, 0), (16, 8, 1, 0)]
    first.close(), second.close()
    assert shapes_of(list_nodes(cache)) == [(0, 16, 0, 1), (16, 4, 0, 0), (16, 8, 0, 0)]
    assert all(each.idle is not None and 0 <= each.idle <= each.age for each in list_nodes(cache))


def test_ids_differ_by_tenant_and_instance_and_stay() -> None:
    ids = set()
    cache = make_paged()
    for salt in (*SALTS, Salt("tenant", "salt", shadow=True), Salt("", "tenant")):
        read_prompt(cache, [*TEXT, 1], salt=salt).close()
        ids |= {each.id for each in list_nodes(cache) if each.salt == salt}
    assert len(ids) == 5
    assert all(len(each) == 32 and int(each, 16) for each in ids)
    same = make_paged()
    read_prompt(same, [*TEXT, 1]).close()
    assert {each.id for each in list_nodes(same)} < ids, "an id is the same after a restart"
    same.hasher.root = b"of another instance"
    read_prompt(same, [*TEXT, 1]).close()
    assert len({each.id for each in list_nodes(same)} - ids) == 1


def test_a_prefix_whose_beginning_is_gone_is_listed_without_parent() -> None:
    cache = make_paged()
    sequence = read_prompt(cache, [*TEXT, 1])
    first = sequence.blocks[0]
    sequence.close()
    cache.pool.unpublish(first)
    (orphan,) = list_nodes(cache)
    assert (orphan.parent, orphan.first_token, orphan.num_tokens) == (None, 4, 12)
    with pytest.raises(PinError, match="no block of this prefix is cached"):
        cache.pin_prefix(orphan.id, ttl=60)
    read_prompt(cache, [*TEXT[:4], 1]).close()
    assert shapes_of(list_nodes(cache)) == [(0, 16, 0, 0)], "it is found again"
    assert find_cached(cache, [*TEXT, 1]) == 16


def test_what_is_not_shared_is_not_listed() -> None:
    cache = make_paged(prefix_cache=False)
    read_prompt(cache, [*TEXT, 1])
    assert list_nodes(cache) == []
    cache = make_paged()
    read_prompt(cache, [1, 2, 3])
    assert list_nodes(cache) == []
    assert not isinstance(make_cache("contiguous"), PrefixListing)


def test_the_most_important_nodes_are_listed_with_their_parents() -> None:
    cache = make_paged(blocks=1000)
    for number in range(20):
        read_prompt(cache, [*TEXT[:8], *[number] * 8, 1]).close()
    pinned = cache.pin([*TEXT[:8], *[3] * 8], salt=NO_SALT, ttl=60)
    running = read_prompt(cache, [*TEXT[:8], *[5] * 8, 1])
    read_prompt(cache, [*TEXT[:8], *[9] * 8, 1]).close()
    nodes, omitted = cache.list_prefixes(4)
    assert (len(nodes), omitted) == (4, 17)
    parent, *children = nodes
    assert (parent.parent, parent.num_tokens, {each.parent for each in children}) == (None, 8, {parent.id})
    assert {each.id for each in children} == {id_of(cache, [*TEXT[:8], *[number] * 8]) for number in (3, 5, 9)}, (
        "one that is pinned, one in use, one with a hit"
    )
    assert [each.pins for each in children if each.pins] == [[pinned.id]]
    assert cache.list_prefixes(3)[1] == 18
    assert [each.id for each in list_nodes(cache, 1)] == [parent.id], "no other has room with its parent"
    assert cache.list_prefixes(0) == ([], 21)
    running.close()


@pytest.mark.fuzz
def test_a_limited_list_is_a_part_of_the_whole_one() -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    cache, texts = make_paged(blocks=2000), [[1] * 40]
    for _ in range(40):
        texts.append([*rng.choice(texts)[: rng.randrange(40)], *rng.choices(range(3), k=rng.randint(1, 12))][:60])
        read_prompt(cache, texts[-1]).close()
    whole = {each.id: each for each in list_nodes(cache)}
    for limit in range(len(whole) + 2):
        nodes, omitted = cache.list_prefixes(limit)
        assert len(nodes) + omitted == len(whole)
        assert len(nodes) <= limit
        seen: set[str | None] = {None}
        for each in nodes:
            assert each.parent in seen
            assert each._replace(age=0, idle=0) == whole[each.id]._replace(age=0, idle=0)
            seen.add(each.id)
    assert omitted == 0


# ---------------------------------------------------------------- pinned and dropped
def test_a_node_is_pinned_with_all_that_comes_before_it() -> None:
    cache = make_paged()
    for end in (1, 2):
        read_prompt(cache, [*TEXT, *[end] * 5]).close()
    parent, child, _ = list_nodes(cache)
    pin = cache.pin_prefix(child.id, ttl=60)
    assert (pin.num_tokens, pin.salt) == (20, NO_SALT)
    assert cache.pins() == [pin]
    by_id = {each.id: each for each in list_nodes(cache)}
    assert (by_id[child.id].pins, by_id[parent.id].pins) == ([pin.id], ())
    assert (by_id[child.id].references, by_id[child.id].idle) == (0, None), "a pin is no sequence"
    evict(cache, 99)
    assert shapes_of(list_nodes(cache)) == [(0, 16, 0, 1), (16, 4, 0, 0)]
    assert cache.unpin(pin.id)
    assert_nothing_leaked(cache)


def test_a_pin_splits_a_node_where_it_ends() -> None:
    cache = make_paged()
    read_prompt(cache, [*TEXT, 1]).close()
    cache.pin_prefix(id_of(cache, TEXT[:8]), ttl=60)  # an id of a block within a node
    assert shapes_of(list_nodes(cache)) == [(0, 8, 0, 0), (8, 8, 0, 0)]


def test_an_unknown_id_is_neither_pinned_nor_dropped() -> None:
    cache = make_paged()
    read_prompt(cache, [*TEXT, 1]).close()
    with pytest.raises(PinError, match="there is no cached prefix 'abc'"):
        cache.pin_prefix("abc", ttl=60)
    assert cache.drop_prefix("abc") is None
    assert len(list_nodes(cache)) == 1


def test_pins_of_nodes_leave_room_for_the_longest_sequence() -> None:
    cache = make_paged(blocks=18)  # the longest has 16 blocks
    read_prompt(cache, [*TEXT, 1]).close()
    (node,) = list_nodes(cache)
    with pytest.raises(PinError, match="longest sequence of strategy 'it'"):
        cache.pin_prefix(node.id, ttl=60)


def test_what_is_not_computed_yet_is_not_pinned() -> None:
    cache = make_paged()
    sequence = open_sequence(cache, [*TEXT, 1])
    (node,) = list_nodes(cache)
    with pytest.raises(PinError, match="no block"):
        cache.pin_prefix(node.id, ttl=60)
    enter(cache, (sequence, TEXT[:9]))
    assert cache.pin_prefix(node.id, ttl=60).num_tokens == 8


def test_a_dropped_node_takes_its_subtree_and_their_pins_along() -> None:
    cache = make_paged()
    for end in (1, 2):
        read_prompt(cache, [*TEXT, *[end] * 5]).close()
    cache.pin([*TEXT, *[1] * 5], salt=NO_SALT, ttl=60)
    kept = cache.pin(TEXT[:8], salt=NO_SALT, ttl=60)
    assert shapes_of(list_nodes(cache)) == [(0, 8, 0, 1), (8, 8, 0, 1), (16, 4, 0, 0), (16, 4, 0, 0)]
    assert cache.drop_prefix(id_of(cache, TEXT[:12])) == 4 * get_block_bytes(cache), "an id within the second node"
    assert cache.pins() == [kept]
    assert shapes_of(list_nodes(cache)) == [(0, 8, 0, 1)], "the hits are those of what is left"
    assert find_cached(cache, [*TEXT, 1]) == 8
    cache.check_integrity()
    assert cache.drop_prefix(id_of(cache, TEXT[:8])) == 2 * get_block_bytes(cache)
    assert_nothing_leaked(cache)


def test_what_is_in_use_stays_and_is_not_found_any_more() -> None:
    cache = make_paged()
    sequence = read_prompt(cache, [*TEXT, 1])
    other = read_prompt(cache, TEXT[:5])
    assert cache.drop_prefix(id_of(cache, TEXT[:8])) == 0
    assert shapes_of(list_nodes(cache)) == [(0, 4, 2, 1)]
    enter(cache, (sequence, [2] * 11))
    enter(cache, (other, [3] * 7))
    assert find_cached(cache, [*TEXT, 1, *[2] * 11]) == 4, "what it computes later is not found either"
    assert find_cached(cache, [*TEXT[:5], *[3] * 7, 1]) == 12
    again = read_prompt(cache, [*TEXT, 1])
    assert again.found == 4
    cache.check_integrity()
    for each in (sequence, other, again):
        each.close()
    assert_nothing_leaked(cache)


def test_only_one_tenants_prefix_is_dropped() -> None:
    cache = make_paged()
    for salt in SALTS:
        read_prompt(cache, [*TEXT, 1], salt=salt).close()
    cache.drop_prefix(id_of(cache, TEXT, SALTS[1]))
    assert [find_cached(cache, [*TEXT, 1], salt=salt) for salt in SALTS] == [16, 0, 16]


# ---------------------------------------------------------------- models with windows
def test_blocks_of_layers_with_a_window_count_in_the_bytes_of_a_node() -> None:
    cache = make_paged(layers=[LAYER, WINDOW, LAYER])
    read_prompt(cache, [*TEXT, 1]).close()
    assert sum(each.num_bytes for each in list_nodes(cache)) == cache.setup.memory.held_bytes
    cache.evict(1)  # a block that the window has passed goes first
    assert shapes_of(list_nodes(cache)) == [(0, 16, 0, 0)]
    assert list_nodes(cache)[0].num_bytes == cache.setup.memory.held_bytes


@pytest.mark.parametrize("kind", ["paged", "quest"])
def test_if_all_layers_have_a_window_the_blocks_of_the_widest_are_listed(kind: str) -> None:
    cache = make_cache(kind, block_size=4, layers=[WINDOW, WINDOW._replace(window=10)])
    assert isinstance(cache, PagedCache)
    text = list(range(10, 51))
    read_prompt(cache, text).close()
    (node,) = list_nodes(cache)
    assert (node.parent, node.first_token, node.num_tokens, node.hits) == (None, 0, 40, 0)
    evict(cache, cache.blocks().idle - 7)  # all but the blocks that a sequence keeps at its end
    (node,) = list_nodes(cache)
    assert node.first_token + node.num_tokens == 40
    assert node.first_token > 0
    sequence = open_sequence(cache, text)
    assert sequence.found == 40
    sequence.close()
    assert [each.hits for each in list_nodes(cache)] == [1]
    assert cache.pin_prefix(node.id, ttl=60).num_tokens == 40
    evict(cache, 99)
    assert find_cached(cache, text) == 40
    assert cache.drop_prefix(node.id)
    assert cache.pins() == list_nodes(cache) == []
    assert find_cached(cache, text) == 0
    assert_nothing_leaked(cache)


def test_what_follows_after_blocks_that_are_gone_is_another_tree() -> None:
    cache = make_paged(layers=[WINDOW, WINDOW])
    sequence = read_prompt(cache, list(range(10, 51)))
    beginning = read_prompt(cache, list(range(10, 15)))  # uses the first block; the next ones are idle
    evict(cache, 99)
    first, last = list_nodes(cache)
    assert (first.first_token, first.num_tokens, last.parent) == (0, BLOCK, None)
    cache.drop_prefix(first.id)
    assert [each.id for each in list_nodes(cache)] == [last.id]
    for each in (sequence, beginning):
        each.close()
    assert cache.drop_prefix(last.id)
    assert_nothing_leaked(cache)
