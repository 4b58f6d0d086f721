"""Keys of real models, with every kind of RoPE: many rotations at boundaries are one by the config's frequencies."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plugin_kit.driver.steps import Keys, Reading, gather, iter_rows
from plugin_kit.driver.texts import random_text
from server.engine.batch import Batch
from server.models.decoder import Decoder
from server.models.rope import compute_frequencies
from tests.cache_strategies.streaming.test_streaming import make_world
from tests.contract.rotary import Streaming
from tests.models.random_models import load_decoder, save_random_model

MODELS = ["llama", "llama3", "llama_linear", "llama_dynamic", "llama_yarn", "phi3_longrope", "smollm3", "gemma3"]
POSITIONS = 160  # of the model: fewer than the text has tokens
LENGTH = 300


def rotate_once(decoder: Decoder, layer: int, k: Tensor, positions: Tensor) -> Tensor:
    """Return un-rotated keys k [N,H,D] as they are at `positions` [N], in float64."""
    rope = decoder.config.layers[layer].rope
    if rope is None:
        return k.double()
    frequencies, _ = compute_frequencies(rope, POSITIONS)
    angle = (positions.double()[:, None] * frequencies)[:, None]
    half = len(frequencies)
    a, b, rest = k.double().split([half, half, k.shape[2] - 2 * half], 2)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest), 2)


@torch.inference_mode()
def read_unrotated(decoder: Decoder, reading: Reading) -> list[Keys]:
    """Read a text whose keys are rotated as the model does, at the positions of each batch; return the last keys."""
    while True:
        n = reading.chunk(random.choice([1, 5, 30]))
        batch = Batch([reading.work(n)])
        at = slice(reading.sequence.length, reading.sequence.length + n)
        for layer, spec in enumerate(decoder.layer_specs):
            assert spec.rotate is not None
            q, k, v = (part[layer][at] for part in (reading.text.q, reading.text.k, reading.text.v))
            batch.attend(layer, q, spec.rotate(k, batch.positions), v)
        if reading.left == n:
            ((cache, rows, row),) = iter_rows(batch)
            return [gather(cache, rows, row, layer) for layer in range(len(decoder.layer_specs))]
        assert not batch.commit()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_keys_are_at_their_positions_within_the_cache(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_random_model(name, tmp_path)
    decoder = load_decoder(tmp_path, dtype, positions=POSITIONS)
    sizes = Streaming(3, random.randint(20, 80), random.randint(5, 30))
    print(sizes)
    world = make_world(decoder.layer_specs, max_seq_len=POSITIONS, dtype=dtype, **sizes._asdict())
    text = random_text(random.randrange(99), LENGTH, decoder.layer_specs, dtype)
    keys = read_unrotated(decoder, world.open("it", text))
    last = torch.tensor([LENGTH - 1])
    for layer, (k, _, positions) in enumerate(keys):
        tokens = positions[:, 0]
        in_cache = sizes.list_positions(last, LENGTH)[0, tokens]
        want = rotate_once(decoder, layer, text.k[layer][tokens], in_cache)
        error = (k.double() - want).norm(dim=2).max() / want.norm(dim=2).max()
        assert error < sizes.count_rotations() * max(torch.finfo(dtype).eps, 1e-6)
