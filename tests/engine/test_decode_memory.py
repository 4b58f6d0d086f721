"""Decoding allocates nothing that grows with the text: the tensors of every step have the same sizes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.engine_driver import Driver
from tests.models.random_models import CONFIGS, save_random_model

STRATEGIES = ["contiguous", "paged", "sliding_window"]


class Largest(TorchDispatchMode):
    """Records the elements of the largest new storage while active; views and in-place results do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.itemsize)
                self.count += 1
        return result


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    directory = tmp_path_factory.mktemp("llama")
    save_random_model("llama", directory)
    return Driver(directory, strategies={"sliding_window": {"kind": "sliding_window", "window": 64}})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_tensor_is_larger_than_the_activations_of_a_step(driver: Driver, strategy: str) -> None:
    config = CONFIGS["llama"]
    widest = max(2 * config.intermediate_size, config.vocab_size, 3 * config.hidden_size)
    driver.submit("r", [5] * 40, max_tokens=100, kv_cache=strategy)
    driver.step()  # the prompt
    driver.step()  # scratch memory has its size
    sizes = []
    while driver.core.busy:
        with Largest() as largest:
            driver.step()
        for _ in range(3):
            driver.step()
        assert largest.count > 0
        sizes.append(largest.numel)
    scores = config.num_attention_heads * 128  # one tile
    assert max(sizes) <= max(widest, scores)
    assert sizes[2] >= sizes[-2], "the step grows with the text"
