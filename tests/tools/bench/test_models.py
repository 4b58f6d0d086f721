"""Models for measuring are of the shape they claim, are served, and are made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from server.models.config import load_config
from tests.engine.engine_driver import Driver
from tests.tools.bench.small_shape import SMALL_SHAPE
from tools.bench.long_contexts import compute_read_bytes
from tools.bench.models import LLAMA, QWEN


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_bytes_of_a_step_are_the_least_that_the_engine_can_read(folder: Path, weights: str) -> None:
    """Norms and biases are left out, and what packed matrices are padded with."""
    driver = Driver(folder / SMALL_SHAPE.name, dtype="bfloat16", weights=weights)
    small = (
        SMALL_SHAPE.layers
        * (2 * SMALL_SHAPE.hidden_size + SMALL_SHAPE.hidden_size + 2 * SMALL_SHAPE.kv_heads * SMALL_SHAPE.head_dim)
        + SMALL_SHAPE.hidden_size
    )
    more = driver.core.model.weight_bytes - SMALL_SHAPE.weight_bytes(weights) - 2 * small
    padded = sum(
        2 * (-(-out // 64) * -(-width // 64) * 64**2 - out * width) for _, (out, width) in SMALL_SHAPE.matrices()
    )
    assert 0 <= more <= padded
    kv_bytes = compute_read_bytes("contiguous", SMALL_SHAPE, driver.engine.max_seq_len)
    assert driver.core.instances["contiguous"].bytes_for(1) == kv_bytes


def test_it_answers_and_every_id_has_a_text(folder: Path) -> None:
    driver = Driver(folder / SMALL_SHAPE.name)
    heard = driver.submit("it", range(40), 5)
    driver.run()
    assert len(heard.tokens) == 5
    tokenizer = Tokenizer.from_file(str(folder / SMALL_SHAPE.name / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SMALL_SHAPE.vocab_size
    assert all(tokenizer.decode([i], skip_special_tokens=False) for i in range(SMALL_SHAPE.vocab_size))
    assert len(tokenizer.encode("def main(arguments: Sequence[str]) -> None:").ids) < 43, "nothing was learnt"


def test_shapes_are_those_of_the_models_they_stand_for(folder: Path) -> None:
    count = sum(out * width for _, (out, width) in QWEN.matrices())
    assert count + 24 * (2 * 896 + 896 + 2 * 128) + 896 == 494_032_768  # as Qwen2.5-0.5B's card has it
    assert 1.0e7 < sum(out * width for _, (out, width) in LLAMA.matrices()) < 1.01e7
    config = load_config(folder / SMALL_SHAPE.name)
    assert (config.num_layers, config.hidden_size, config.num_kv_heads) == (2, 128, 2)
    assert config.qkv_bias
    assert config.tie_embeddings
