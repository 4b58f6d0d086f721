"""The maximum cost of a decode step, counted and not timed: operations, new tensors, bytes read.

The bounds are what a step costs today. A change that makes a step cheaper lowers them; one that has to raise one says
why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from kernels.composite import CompositeOps
from kernels.cpu.backend import CpuOps
from kernels.ops import GatedMLP, Ops
from kernels.selfcheck.op_counter import OpCounter
from server.engine.batch import Batch
from server.engine.instance_reports import count_tokens
from server.models.decoder import Decoder
from tests.engine.engine_driver import Driver
from tests.models.random_models import CONFIGS, save_random_model

STRATEGIES = ("contiguous", "paged", "sliding_window")
# Instances that keep or read fewer bytes of a text, with options that make a difference after PROMPT tokens
READ_LESS: Mapping[str, Mapping[str, Any]] = {
    "int8": {"kind": "paged", "k_dtype": "int8", "v_dtype": "int8"},
    "compressed": {"kind": "compressed", "budget": 24, "every": 32, "recent": 4, "sinks": 2},
    "by_head": {"kind": "compressed", "budget": 24, "every": 32, "recent": 4, "sinks": 2, "by_head": True},
    "streaming": {"kind": "streaming", "window": 16, "every": 32, "sinks": 2},
    "quest": {"kind": "quest", "budget": 16, "min_tokens": 16, "block_size": 4},
}
LAYERS = (2, 5)
SEQUENCES = 3
PROMPT = 40  # tokens of each
WARM = 4  # steps
FLOAT = 4  # bytes


WIDTHS = 30  # activations that a layer moves for a token, in widths of the model


class Cost(NamedTuple):
    """The cost of one decode step, or of a layer in it."""

    dispatched: int  # torch's operations, and those of our libraries; what these call within does not count
    tensors: int  # made, each with memory of its own
    calls: int  # of our operations

    def __le__(self, most: tuple[int, ...]) -> bool:
        """Return whether every count is at most the other's."""
        return all(ours <= theirs for ours, theirs in zip(self, most, strict=True))


class Budget(NamedTuple):
    """The maximum of each count."""

    layer: Cost
    step: Cost  # besides its layers


BUDGETS = {  # by whose operations they are
    "kernels": Budget(Cost(dispatched=0, tensors=0, calls=5), Cost(dispatched=14, tensors=6, calls=3)),
    # Five of a layer's keep what is not finite from queries that may not see it; a step's check the addresses, once,
    # with four more of them for a ring, as no token may overwrite another of its row.
    "reference": Budget(Cost(dispatched=110, tensors=48, calls=10), Cost(dispatched=196, tensors=137, calls=3)),
}
READ_LESS_BUDGETS = {  # with kernels; what is more than with `paged` makes addresses, and with quest chooses blocks
    "int8": BUDGETS["kernels"],
    "compressed": Budget(Cost(dispatched=0, tensors=0, calls=5), Cost(dispatched=22, tensors=6, calls=3)),
    "by_head": Budget(Cost(dispatched=4, tensors=0, calls=5), Cost(dispatched=18, tensors=6, calls=3)),
    "streaming": Budget(Cost(dispatched=0, tensors=0, calls=5), Cost(dispatched=22, tensors=6, calls=3)),
    "quest": Budget(Cost(dispatched=12, tensors=1, calls=6), Cost(dispatched=50, tensors=9, calls=3)),
}
STRATEGY = Budget(Cost(dispatched=8, tensors=0, calls=2), Cost(dispatched=8, tensors=0, calls=0))  # a further one


class Seen(TorchDispatchMode):
    """Counts the operations that are dispatched while it is active, and the memory of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatched = self.tensors = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.dispatched += 1
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in known:
                self.tensors += 1
                self.bytes += each.untyped_storage().nbytes()
        return result


def config(layers: int) -> LlamaConfig:
    shape = {"num_hidden_layers": layers, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    return LlamaConfig(**(CONFIGS["llama"].to_dict() | shape))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return directories of random Llamas that differ in their number of layers."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for layers in LAYERS:
            patch.setitem(CONFIGS, "llama_budget", config(layers))
            made[layers] = tmp_path_factory.mktemp("llama")
            save_random_model("llama_budget", made[layers])
    return made


@contextmanager
def decoding(directory: Path, *strategies: str, kernels: str = "auto", sequences: int = SEQUENCES) -> Iterator[Driver]:
    """Return an engine some steps after its prompts, with sequences under all strategies."""
    driver = Driver(
        directory, kernels=kernels, strategies={name: READ_LESS.get(name, {"kind": name}) for name in strategies}
    )
    for i in range(sequences):
        driver.submit(str(i), [5 + i] * PROMPT, max_tokens=60, kv_cache=strategies[i % len(strategies)])
    for _ in range(1 + WARM):
        driver.step()
    driver.core.timing_interval = 0
    yield driver
    assert all(request.num_output_tokens > WARM for request in driver.requests), "it did not decode all the time"


def cost(driver: Driver) -> tuple[Cost, int]:
    """Return the cost of a step, and the bytes of the new tensors of the next one."""
    with driver.core.tracer.record(OpCounter()) as counter:
        driver.step()
    with Seen() as seen:
        driver.core.step()
    return Cost(seen.dispatched, seen.tensors, counter.calls.total()), seen.bytes


def split(few: Cost, many: Cost) -> Budget:
    """Return the cost of a layer and of the rest of a step, from engines that differ in their number of layers."""
    layers = LAYERS[1] - LAYERS[0]
    layer = Cost(*(-(-(b - a) // layers) for a, b in zip(few, many, strict=True)))
    return Budget(layer, Cost(*(a - LAYERS[0] * each for a, each in zip(few, layer, strict=True))))


def spent(models: dict[int, Path], *strategies: str, kernels: str = "auto") -> tuple[Budget, str]:
    """Return the costs of a step and of a layer, and whether kernels or the reference computed them."""
    found = []
    for layers in LAYERS:
        with decoding(models[layers], *strategies, kernels=kernels) as driver:
            first, second = cost(driver)[0], cost(driver)[0]
            assert first == second, "steps cost more and more"
            found.append(first)
            backend = driver.engine.kernels.backend
    return split(*found), backend if backend == "reference" else "kernels"


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_and_a_layer_cost_no_more(models: dict[int, Path], kernels: str, strategy: str) -> None:
    ours, backend = spent(models, strategy, kernels=kernels)
    most = BUDGETS[backend]
    assert ours.layer <= most.layer
    assert ours.step <= most.step


def test_mixed_strategies_cost_their_own_operations_and_nothing_else(models: dict[int, Path]) -> None:
    ours, backend = spent(models, *STRATEGIES)
    if backend == "reference":  # there every row is cut out anyway, whoever keeps its keys
        assert ours.layer.calls <= BUDGETS[backend].layer.calls + 2 * STRATEGY.layer.calls
        return
    for each, one, more in zip(ours, BUDGETS[backend], STRATEGY, strict=True):
        assert each <= Cost(*(a + (len(STRATEGIES) - 1) * b for a, b in zip(one, more, strict=True)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensors_of_a_step_are_activations(models: dict[int, Path], strategy: str) -> None:
    """Each new tensor is at most as large as the largest result of an operation."""
    shape = config(LAYERS[0])
    with decoding(models[LAYERS[0]], strategy) as driver:
        activations = SEQUENCES * FLOAT * (LAYERS[0] * WIDTHS * shape.hidden_size + 3 * shape.vocab_size)
        if driver.engine.kernels.backend == "reference":
            activations += SEQUENCES * FLOAT * LAYERS[0] * 128 * 2 * shape.num_attention_heads * shape.head_dim  # tiles
        sizes = [cost(driver)[1] for _ in range(3)]
    assert 0 < sizes[0] == sizes[1] == sizes[2] <= activations


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_and_keys_are_read_once(models: dict[int, Path], strategy: str) -> None:
    with decoding(models[LAYERS[0]], strategy, sequences=1) as driver:
        least, most = bounds(driver)
        with driver.core.tracer.record(OpCounter()) as counter:
            driver.core.step()
    assert least <= counter.bytes.total() <= most


@pytest.mark.parametrize("name", READ_LESS)
def test_a_step_that_reads_less_costs_few_operations_more(models: dict[int, Path], name: str) -> None:
    ours, backend = spent(models, name)
    if backend == "kernels":
        assert ours.layer <= READ_LESS_BUDGETS[name].layer
        assert ours.step <= READ_LESS_BUDGETS[name].step


@pytest.mark.parametrize("name", READ_LESS)
def test_what_is_not_kept_or_not_chosen_is_not_read(models: dict[int, Path], name: str) -> None:
    c = config(LAYERS[0])
    vectors = LAYERS[0] * 2 * c.num_key_value_heads  # keys and values of a token
    token_bytes = FLOAT * vectors * c.head_dim
    read, tokens = dict[str, int](), dict[str, int]()
    for each in ("paged", name):
        with decoding(models[LAYERS[0]], each) as driver:
            kept = count_tokens(driver.core.instances[each]).kept
            tokens[each] = kept + SEQUENCES  # the new ones, too
            with driver.core.tracer.record(OpCounter()) as counter:
                driver.core.step()
            read[each] = counter.bytes.total()
    saved = read["paged"] - read[name]
    if name == "int8":
        number_bytes = FLOAT * c.head_dim - (c.head_dim + FLOAT)  # a byte for each number, and a scale
        assert saved == vectors * number_bytes * (tokens[name] + SEQUENCES)  # those that are written count again
    elif name == "quest":
        options = READ_LESS[name]
        summaries = -(-tokens[name] // options["block_size"])  # a vector for keys and one for values in each block
        assert saved >= token_bytes * (
            tokens[name] - SEQUENCES * (options["budget"] + options["block_size"]) - summaries
        )
    else:
        assert tokens[name] < tokens["paged"]
        assert saved == token_bytes * (tokens["paged"] - tokens[name])


def bounds(driver: Driver) -> tuple[int, int]:
    """Bytes that the next step of one sequence must read, by arithmetic, and with activations.

    These are fewer than the smallest matrix has, so that one that is read twice is told from them.
    """
    c = config(LAYERS[0])
    d, heads, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    weights = LAYERS[0] * ((heads + 2 * kv) * d + heads * d + 3 * c.intermediate_size * d) + c.vocab_size * d
    (request,) = driver.requests
    assert request.sequence is not None
    least = FLOAT * (weights + LAYERS[0] * 2 * kv * (request.sequence.length + 1))
    activations = FLOAT * (LAYERS[0] * WIDTHS * d + c.vocab_size + 8 * d)
    assert activations < FLOAT * heads * d
    return least, least + activations


def test_a_matrix_that_is_read_twice_is_told(models: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with decoding(models[LAYERS[0]], "paged", sequences=1) as driver:
        _, most = bounds(driver)
        model = driver.core.model
        assert isinstance(model, Decoder)
        o, fed = model._layers.layers[0].attention.o, GatedMLP.__call__  # the smallest matrix, as wide as it is high

        def twice(self: GatedMLP, ops: Ops, h: Tensor) -> Tensor:
            ops.linear(h, o)
            return fed(self, ops, h)

        monkeypatch.setattr(GatedMLP, "__call__", twice)
        with driver.core.tracer.record(OpCounter()) as counter:
            driver.core.step()
    assert counter.bytes.total() > most


def test_an_operation_more_in_a_layer_is_told(models: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Batch.attend
    monkeypatch.setattr(Batch, "attend", lambda self, *qkv: attend(self, *qkv).clone())
    monkeypatch.setattr(CpuOps, "forward_layers", CompositeOps.forward_layers)  # so that attend() is called
    ours, backend = spent(models, "paged")
    most = BUDGETS[backend]
    assert ours.layer.dispatched > most.layer.dispatched, f"a layer costs less than BUDGETS says: lower it, {ours}"
    assert ours.layer.tensors > most.layer.tensors, f"a layer costs less than BUDGETS says: lower it, {ours}"
    assert not ours.layer <= most.layer
