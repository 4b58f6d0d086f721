"""What `kvmux doctor --model` says: how a model would run here, and what its texts take. Loads no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import psutil
from pydantic import ByteSize

from cache_strategies import registry
from cache_strategies.memory import make_memory
from cache_strategies.spaces import find_space
from cache_strategies.types import Geometry
from config.errors import SettingsError
from config.settings import StrategySettings
from kernels.backends import load_ops
from kernels.device import get_device
from kernels.states import compute_slot_bytes
from kernels.types import LayerSpec
from server.engine.device import choose_device, choose_dtype
from server.models.files.directory import locate
from server.models.shape import ModelShape, read_model_shape

USERS = (1, 8, 32)
TOKENS = (1024, 8192, 32768, 131072)
LEAST_TOKENS = 4096  # of the texts with which strategies are tried


def describe_model(model: str, revision: str | None = None) -> dict[str, dict[str, str]]:
    """Return facts about a model under headings. Raises ModelError or SettingsError if it cannot be served."""
    shape = read_model_shape(locate(model, revision))
    return {
        "model": dict(_describe_shape(shape)),
        "memory of texts": dict(_describe_texts(shape)),
        "strategies": dict(_try_strategies(shape)),
    }


def _describe_shape(shape: ModelShape) -> Iterator[tuple[str, str]]:
    by = {"lean": "kvmux's own decoder", "transformers": "transformers, with kvmux's attention: slower"}
    yield "computed by", by[shape.impl]
    yield "context", f"{shape.info.max_positions:,} tokens"
    free = psutil.virtual_memory().available
    yield "files of weights", f"{_format_bytes(shape.file_bytes)}; {_format_bytes(free)} of memory are free"
    kinds = Counter(map(_describe_attention, shape.attention))
    for kind, count in kinds.items():
        yield f"{count} with attention", kind
    if shape.states:
        size = _format_bytes(compute_slot_bytes(shape.states))
        yield f"{len(shape.states)} with states", f"{size} a text, twice while it runs, and once for each checkpoint"


def _describe_attention(layer: LayerSpec) -> str:
    window = "" if layer.window is None else f", a window of {layer.window:,}"
    return f"{layer.num_q_heads} heads over {layer.num_kv_heads} of keys, of {layer.head_dim} numbers{window}"


def _describe_texts(shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Yield the bytes of keys, values and states of some users' texts, for two presets."""
    geometry = _make_geometry(shape, shape.info.max_positions)
    round_block = find_space("cpu").round_block
    sizes = {
        name: registry.compute_sizes(_declare(StrategySettings.model_validate({"preset": name})), geometry)
        for name in ("exact", "small")
    }
    for tokens in [*(each for each in TOKENS if each < shape.info.max_positions), shape.info.max_positions]:
        each = {name: size.count_bytes(tokens, round_block) for name, size in sizes.items()}
        for users in USERS:
            words = (f"{name} {_format_bytes(users * size)}" for name, size in each.items())
            yield f"{users} of {tokens:,} tokens", ", ".join(words)


def _try_strategies(shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Yield whether each installed kind of strategy works with the model's layers, by building it."""
    length = min(LEAST_TOKENS, shape.info.max_positions)
    geometry = _make_geometry(shape, length)
    ops = load_ops(get_device("cpu"), geometry.kv_dtype).ops
    for kind in registry.list_kinds():
        try:
            declared = _declare(StrategySettings(kind=kind))
            least = registry.compute_least_bytes([declared], geometry, find_space("cpu").round_block)
            cache = registry.build_cache(declared, geometry, make_memory(least), ops)
        except SettingsError as error:
            yield kind, f"no: {error}"
        else:
            finds = cache.contract.granularity is not None and (cache.contract.replayable or not shape.states)
            yield kind, f"yes{'; shares common prefixes' if finds else ''}"


def _declare(settings: StrategySettings) -> registry.DeclaredInstance:
    (declared,) = registry.resolve_instances({settings.kind: settings})
    return declared


def _make_geometry(shape: ModelShape, max_seq_len: int) -> Geometry:
    dtype = choose_dtype("auto", shape.info.dtype, choose_device("auto"))
    return Geometry(shape.attention, dtype, 1, max_seq_len, min(max_seq_len, 512), shape.states, shape.info.eos_ids)


def _format_bytes(size: int) -> str:
    return ByteSize(size).human_readable(separator=" ")
