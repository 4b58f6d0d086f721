"""The options of `streaming`, and the numbers that they give for a model: sinks, window and boundaries.

Knows neither memory nor keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pydantic import Field

from cache_strategies.block_table import TableOptions
from cache_strategies.compressed.options import CompressedOptions
from config.errors import SettingsError
from kernels.types import LayerSpec

DEFAULT_WINDOW = 1024  # unless max_seq_len is too short for it
DEFAULT_EVERY = 256  # unless the window is shorter than four times that


class StreamingOptions(TableOptions):
    """Options of a streaming cache: which tokens stay, and when the others are dropped."""

    window: int | None = Field(
        None, ge=1, description="latest tokens that stay at a boundary; default: half of max_seq_len, at most 1024"
    )
    sinks: int = Field(4, ge=0, description="first tokens of a text that are never dropped")
    every: int | None = Field(
        None,
        ge=1,
        description="tokens from one boundary to the next, at which tokens are dropped; default: a quarter of the "
        "window, at most 256",
    )
    block_size: int = Field(32, ge=1, le=1024, description="tokens in a block")


class KeptSizes(NamedTuple):
    """How many tokens stay at a boundary, and how many there are from one boundary to the next."""

    sinks: int
    window: int
    every: int

    @property
    def kept(self) -> int:
        """The most tokens that stay at a boundary: then it is also the position of the next token."""
        return self.sinks + self.window

    @classmethod
    def resolve(cls, options: StreamingOptions, max_seq_len: int) -> KeptSizes:
        """Return the sizes of an instance; those without an option are chosen to fit max_seq_len, if possible."""
        room = max_seq_len - options.sinks
        window = options.window or max(1, min(DEFAULT_WINDOW, max_seq_len // 2, room - (options.every or 1)))
        every = options.every or max(1, min(DEFAULT_EVERY, window // 4, room - window))
        return cls(options.sinks, window, every)

    def check(self, name: str, max_seq_len: int) -> None:
        """Raise SettingsError if the positions until the next boundary are more than the model has."""
        needed = self.kept + self.every
        if needed > max_seq_len:
            raise SettingsError(
                f"strategies.{name}: sinks={self.sinks}, window={self.window} and every={self.every} take {needed} "
                f"positions, more than max_seq_len={max_seq_len}: lower one of them"
            )

    def make_options(self, options: StreamingOptions) -> CompressedOptions:
        """Return the options with which `compressed` has the same memory and the same boundaries."""
        return CompressedOptions(
            scorer="streaming_llm",
            budget=self.kept,
            sinks=self.sinks,
            recent=0,
            every=self.every,
            block_size=options.block_size,
            **options.model_dump(include=set(TableOptions.model_fields)),
        )


def check_rotation(name: str, layers: Sequence[LayerSpec]) -> None:
    """Raise SettingsError if there are layers whose keys cannot be rotated to other positions."""
    fixed = [str(i) for i, spec in enumerate(layers) if spec.rotate is None]
    if fixed:
        raise SettingsError(
            f"strategies.{name}: kind 'streaming' rotates keys (RoPE) to positions within the cache, which is not "
            f"possible in layers {', '.join(fixed)} of {len(layers)}: kvmux does not know how this model encodes "
            "positions; choose another kind, such as sliding_window"
        )
