"""The options of `residual`, and how many tokens of a sequence it has in full. Knows numbers of tokens only."""

from __future__ import annotations

from pydantic import Field

from cache_strategies.block_table import KVDtype
from cache_strategies.paged.base import PagedOptions
from cache_strategies.sliding_window import INT32_MAX, compute_max_row, compute_ring_size
from cache_strategies.types import Geometry


class ResidualOptions(PagedOptions):
    """Options of a residual cache: those of a paged one, and which tokens it also has as they were computed."""

    k_dtype: KVDtype = Field(
        "int8", description="how keys are stored in blocks: rounded to int8 or int4, or as computed (model)"
    )
    v_dtype: KVDtype = Field("int4", description="how values are stored in blocks; they bear fewer bits than keys")
    residual_length: int = Field(
        128, ge=1, le=INT32_MAX, description="number of latest tokens that a query reads in full, itself included"
    )
    sinks: int = Field(4, ge=0, le=INT32_MAX, description="number of first tokens that all queries read in full")
    max_row: int | None = Field(
        None,
        ge=1,
        le=INT32_MAX,
        description="maximum number of tokens of a sequence in one step; default: residual_length",
    )

    @property
    def shares_sinks(self) -> bool:
        """Whether sequences find the sinks of cached prefixes as they were computed."""
        return self.prefix_cache and self.sinks > 0

    def count_tokens_with_sinks(self, block_size: int) -> int:
        """Return the number of tokens in the blocks that have the sinks."""
        return -(-self.sinks // block_size) * block_size

    def compute_max_row(self, geometry: Geometry) -> int:
        """Return the most tokens of a row."""
        return compute_max_row(self.residual_length, self.max_row, geometry)

    def compute_ring_size(self, geometry: Geometry) -> int:
        """Return the number of slots of a ring buffer: as under `sliding_window`."""
        return compute_ring_size(self.residual_length, self.sinks, self.max_row, geometry)
