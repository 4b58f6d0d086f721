"""kvpress:NAME: scores keys with a press of NVIDIA's library kvpress, which is run unmodified.

A press reads the attention module of a model, its input and its cache. `compressed` has none of these, but keys, values
and the latest queries, from which a stand-in of the module answers: its input ("hidden states") is the queries and keys
themselves, and its projections return them. At later boundaries a press sees the keys that earlier ones left, and the
queries since; one that needs a query for each key sees the new keys only, and the others keep their scores.

kvpress is imported when a scorer of it is loaded, and then wraps the attention functions of transformers. Its presses
are in https://github.com/NVIDIA/kvpress (Devoto et al., 2025, arXiv:2510.00636).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field, create_model
from torch import Tensor

from cache_strategies.plugins import load_class
from cache_strategies.scorers.base import Past, Scorer, ScorerOptions
from config.errors import SettingsError
from kernels.types import LayerSpec

INSTALL = "pip install kvpress==0.5.5 'transformers>=5.2,<5.3'"
MAX_SIZE = 16384  # of an option that is a whole number: some presses make a matrix for each position
TRIED_TOKENS = 512
ROTATED_AT_ONCE = 32  # positions; all models have tables of RoPE for more
Rotate = Callable[[Tensor, Tensor], Tensor]


class Reads(NamedTuple):
    """What the score of a press reads, beside keys and values."""

    # How many of the latest queries; None: all since the boundary before; a text: the value of this option, and one
    num_queries: int | str | None = 0
    attention: bool = False  # the attention weights of these queries
    keys: bool = False  # keys before their rotation (RoPE)
    rope: bool = False  # queries before their rotation, or rotations to later positions
    each_query: bool = False  # as many queries as keys


UNKNOWN = Reads(None, attention=True, keys=True, rope=True)  # a press that is not in kvpress may read anything
READS: Mapping[str, Reads] = {  # by the class that defines `score`
    "CURPress": Reads(),
    "CapPress": Reads(None, rope=True),
    "CompactorPress": Reads(None, keys=True, each_query=True),
    "ExpectedAttentionPress": Reads(None, rope=True),
    "KeyDiffPress": Reads(),
    "KnormPress": Reads(),
    "LagKVPress": Reads(),
    "LeverageScorePress": Reads(keys=True),
    "NonCausalAttnPress": Reads(None, each_query=True),
    "ObservedAttentionPress": Reads(None, attention=True, each_query=True),
    "RandomPress": Reads(),
    "SnapKVPress": Reads("window_size", attention=True),
    "StreamingLLMPress": Reads(),
    "TOVAPress": Reads(1, attention=True),
}


# ---------------------------------------------------------------- from a name to a class
@cache
def load_press(name: str) -> type[Scorer]:
    """Return the scorer that runs a press: of kvpress, by its name, or one of your own, as module:Class.

    Raises SettingsError if kvpress is not installed, or if there is no such press or it cannot be run.
    """
    library = import_kvpress(name)
    if ":" in name:
        press = load_class(name, {}, library.BasePress, what="press", plural="presses")
    else:
        presses = {simplify_name(each): getattr(library, each) for each in library.__all__ if each.endswith("Press")}
        found = presses.get(simplify_name(name))
        if found is None:
            raise SettingsError(f"kvpress has no press {name!r}; {_list_presses(library)}")
        press = found
    if reason := find_obstacle(press, library):
        raise SettingsError(f"the press {press.__name__} cannot rank keys here: {reason}; {_list_presses(library)}")
    return adapt(press)


def simplify_name(name: str) -> str:
    """Return the name of a press without "Press", underscores and capitals, which users may leave out."""
    return name.lower().replace("_", "").removesuffix("press")


def import_kvpress(name: str) -> ModuleType:
    """Import kvpress for the press `name`. Raises SettingsError, which says what to install, if that fails."""
    try:
        return importlib.import_module("kvpress")
    except Exception as error:  # with another transformers, it fails in many ways
        raise SettingsError(
            f"scorer 'kvpress:{name}' needs kvpress and a transformers that it works with ({error}): {INSTALL}"
        ) from None


def find_obstacle(press: type[Any], library: ModuleType) -> str | None:
    """Return why a press cannot be run by its score alone; None if it can."""
    base = library.ScorerPress
    required = [p.name for p in inspect.signature(press).parameters.values() if p.default is p.empty]
    if required:
        return f"it is made of other objects ({', '.join(required)})"
    if not issubclass(press, base) or press is base:
        return "it is not a ScorerPress, which gives each key a score"
    if press.post_init_from_model is not base.post_init_from_model:
        return "it loads weights or statistics that were made for one model"
    if press.compress is not base.compress:
        return 'it also decides how many keys stay, which `budget` and `by_layer = "pyramid"` do here'
    return None


def _list_presses(library: ModuleType) -> str:
    presses = [getattr(library, name) for name in library.__all__ if name.endswith("Press")]
    names = sorted(each.__name__.removesuffix("Press") for each in presses if find_obstacle(each, library) is None)
    return f"those that can be used are {', '.join(names)}"


def adapt(press: type[Any]) -> type[Scorer]:
    """Return a scorer that runs a press, a dataclass; its options are the fields, without `compression_ratio`."""
    owner = next(each for each in press.__mro__ if "score" in vars(each))
    is_known = owner.__module__.partition(".")[0] == "kvpress"
    reads = READS.get(owner.__name__, UNKNOWN) if is_known else UNKNOWN
    members = {
        "__doc__": f"Scores keys as {press.__name__} does.",
        "__module__": __name__,
        "press_type": press,
        "reads": reads,
        "options_type": make_options_type(press),
    }
    return type(f"{press.__name__}Scorer", (PressScorer,), members)


def make_options_type(press: type[Any]) -> type[ScorerOptions]:
    """Return the options that are the fields of a press, with its defaults."""
    hints = typing.get_type_hints(press)
    fields: dict[str, Any] = {}
    for each in dataclasses.fields(press):
        name, kind = each.name, hints[each.name]
        if each.init and each.default is not dataclasses.MISSING and name[0] != "_" and name != "compression_ratio":
            least, most = (0, MAX_SIZE) if kind is int else (None, None)
            fields[name] = kind, Field(each.default, ge=least, le=most, description=f"as in kvpress's {press.__name__}")
    return create_model(f"{press.__name__}Options", __base__=ScorerOptions, **fields)


# ---------------------------------------------------------------- scores
class PressScorer(Scorer):
    """Scores keys as a press of kvpress does."""

    press_type: ClassVar[type[Any]]
    reads: ClassVar[Reads]

    def __init__(self, options: ScorerOptions) -> None:
        super().__init__(options)
        name, wanted = self.press_type.__name__, self.reads.num_queries
        try:
            self.press = self.press_type(**options.model_dump())
        except Exception as error:  # a press checks its fields in its own ways
            raise SettingsError(f"scorer_options: kvpress's {name} refuses them: {error}") from None
        self.num_queries = getattr(options, wanted) + 1 if isinstance(wanted, str) else wanted
        self._checked: set[Rotate] = set()  # rotations that are those that presses compute

    def check_layers(self, layers: Sequence[LayerSpec]) -> None:
        name = self.press_type.__name__
        for spec in layers:
            if spec.rotate is None and (self.reads.rope or self.reads.keys):
                raise SettingsError(
                    f"kvpress's {name} must undo the rotation of queries or keys (RoPE), for which this model's layers "
                    "have no function"
                )
            with suppress(RuntimeError):  # the model's tables are on another device: `score` checks them
                self._check_rotation(spec, torch.device("cpu"))
        for spec in layers[:1]:
            self._try_out(spec)

    def score(self, past: Past) -> Tensor:
        device = past.positions.device
        self._check_rotation(past.spec, device)
        S = past.positions.shape[1]
        first = S - past.num_new if self.reads.each_query else 0  # the first key that is scored
        self.press.compression_ratio = compute_ratio(past.num_kept, S)
        with repeatable_random_numbers(compute_seed(past.length, past.layer_idx, past.first_head), device):
            scores: Tensor = self.press.score(*make_arguments(past, self.reads, first))[0]
        if self.reads.each_query:
            known = past.key_state.get("score")
            scores = scores if known is None else torch.cat((known[:, :first], scores), dim=1)
            past.key_state["score"] = scores
        return scores

    def _check_rotation(self, spec: LayerSpec, device: torch.device) -> None:
        """Raise SettingsError if the press reads rotations, and the layer's differ from those that presses compute."""
        rotate = spec.rotate
        if not self.reads.rope or rotate is None or rotate in self._checked:
            return
        positions = torch.tensor([1, 7, 30], device=device)
        x = torch.linspace(-1, 1, spec.head_dim, device=device).expand(3, 1, -1).contiguous()
        cos, sin = (each[:, None] for each in compute_rotations(rotate, positions, 30, spec.head_dim))
        a, b = x.chunk(2, dim=-1)
        if not torch.allclose(x * cos + torch.cat((-b, a), dim=-1) * sin, rotate(x, positions), atol=1e-4):
            raise SettingsError(
                f"kvpress's {self.press_type.__name__} computes the rotation of queries (RoPE) as it is in Llama; this "
                "model rotates other dimensions"
            )
        self._checked.add(rotate)

    def _try_out(self, spec: LayerSpec) -> None:
        """Raise SettingsError if the press fails to score random keys of a layer, as it does with wrong options."""
        S = max(TRIED_TOKENS, self.num_queries or 0)
        T = S if self.num_queries is None else self.num_queries
        G, D, generator = spec.num_q_heads // spec.num_kv_heads, spec.head_dim, torch.Generator().manual_seed(0)
        shapes = (S, 1, D), (S, 1, spec.v_head_dim), (T, G, D)
        keys, values, queries = (torch.randn(*shape, generator=generator) for shape in shapes)
        spec = LayerSpec(1, G, D, spec.v_head_dim, scale=spec.scale, rotate=_leave)
        positions = torch.arange(S)[None]
        past = Past(0, spec, S, S, positions, lambda: keys, lambda: values, queries, num_kept=S // 2)
        try:
            scores = self.score(past)
            if scores.shape != positions.shape or scores.isnan().any():
                raise ValueError(f"its scores have the shape {list(scores.shape)}, or some are not numbers")
        except Exception as error:  # a press fails in its own ways
            name = self.press_type.__name__
            raise SettingsError(
                f"kvpress's {name} fails to score {S} keys of this model with these scorer_options: {error}"
            ) from None


def _leave(x: Tensor, delta: Tensor) -> Tensor:
    return x


def compute_ratio(num_kept: int, num_keys: int) -> float:
    """Return the `compression_ratio` with which kvpress keeps `num_kept` of the keys: int(num_keys * (1 - ratio))."""
    if num_kept >= num_keys:
        return 0.0
    return 1 - (num_kept + 1e-6) / num_keys  # a little more, as it rounds downwards


def compute_seed(length: int, layer_idx: int, first_head: int = 0) -> int:
    """Return the seed of a press's random numbers, which depend on the text's length, the layer and the head alone."""
    return length * 1_000_003 + layer_idx * 1009 + first_head


@contextmanager
def repeatable_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers within the block, and restore their state after it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


# ---------------------------------------------------------------- what a press is given
class AttentionStandIn:
    """Answers what presses read of a model's attention module, for one layer of one sequence."""

    def __init__(self, past: Past, width: int) -> None:
        """Take over a layer's numbers; the first `width` columns of its input are queries, the others keys."""
        spec = past.spec
        self.layer_idx = past.layer_idx
        self.head_dim, self.scaling = spec.head_dim, spec.scale
        self.num_key_value_groups = past.num_groups
        self.training = False
        self.config = SimpleNamespace(
            num_attention_heads=spec.num_q_heads, num_key_value_heads=spec.num_kv_heads, head_dim=spec.head_dim
        )
        self._past, self._width = past, width

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"it reads {name!r} of the attention module, which kvmux does not give to scorers")

    def q_proj(self, hidden: Tensor) -> Tensor:
        """Return the queries of the input [1, n, width + ...], [1, n, Hq * D]."""
        return hidden[..., : self._width]

    def k_proj(self, hidden: Tensor) -> Tensor:
        """Return the keys of the input, [1, n, H * D]."""
        return hidden[..., self._width :]

    def rotary_emb(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [1, n, D] at positions [1, n], which count from the first of the layer's inputs."""
        past, spec = self._past, self._past.spec
        assert spec.rotate is not None, "check_layers has refused the layer"
        positions = position_ids[0] + (past.length - len(past.queries))
        cos, sin = compute_rotations(spec.rotate, positions, past.length - 1, spec.head_dim)
        return cos[None].to(x.dtype), sin[None].to(x.dtype)


def make_arguments(past: Past, reads: Reads, first: int) -> tuple[Any, ...]:
    """Return what `ScorerPress.score` takes, for the keys from the index `first` on.

    These are the module, its input [1, n, ...], keys [1, H, S, D], values, attention weights [1, Hq, T, S] and a dict
    with cos and sin. Queries that need not be unrotated stay as they are, and cos and sin leave them so.
    """
    rows, columns, width = past.positions.shape[1] - first, [], 0
    if reads.num_queries != 0:
        queries = past.unrotate(past.queries, past.query_positions) if reads.rope else past.queries
        rows, width = len(queries), past.spec.num_q_heads * past.spec.head_dim
        columns.append(queries.flatten(1))
    if reads.keys:
        columns.append(_unrotate_keys(past, rows))
    hidden = torch.cat(columns, dim=1) if columns else past.keys.new_zeros(rows, 0)
    module = AttentionStandIn(past, width)
    if reads.rope:
        embeddings = module.rotary_emb(hidden, torch.arange(rows, device=hidden.device)[None])
    else:
        cos = hidden.new_ones(1, rows, past.spec.head_dim)
        embeddings = cos, torch.zeros_like(cos)
    weights = past.attention_weights().flatten(0, 1)[None, ..., first:] if reads.attention else None
    keys, values = (x[None, :, first:] for x in (past.keys, past.values))
    return module, hidden[None], keys, values, weights, {"position_embeddings": embeddings}


def _unrotate_keys(past: Past, count: int) -> Tensor:
    """Return the last `count` keys before their rotation, [count, H * D]."""
    keys, positions = past.keys[:, -count:], past.positions[:, -count:]
    turned = past.unrotate(keys.reshape(-1, 1, keys.shape[2]), positions.reshape(-1))
    return turned.view_as(keys).transpose(0, 1).flatten(1)


def compute_rotations(rotate: Rotate, positions: Tensor, last: int, D: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin [n, D] of the rotations to `positions` [n], if dimension i is rotated with i + D / 2.

    A model's tables may end after the position `last`; later rotations are products of earlier ones.
    """

    def turn(steps: Tensor) -> Tensor:  # [n, D / 2], as complex numbers in float64 on the host: mps has none
        ones = torch.cat((torch.ones(D // 2), torch.zeros(D // 2))).to(positions.device)
        turned = rotate(ones.expand(len(steps), 1, D).contiguous(), steps)[:, 0].cpu().double()
        return torch.complex(*turned.chunk(2, dim=1))

    within = positions.clamp(max=last)
    beyond = positions - within
    numbers = turn(within)
    if beyond.any():
        long = turn(torch.full_like(positions[:1], ROTATED_AT_ONCE))
        numbers = numbers * turn(beyond % ROTATED_AT_ONCE) * long ** (beyond.cpu() // ROTATED_AT_ONCE)[:, None]
    cos, sin = (x.repeat(1, 2).float().to(positions.device) for x in (numbers.real, numbers.imag))
    return cos, sin
