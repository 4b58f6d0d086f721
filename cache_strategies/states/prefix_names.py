"""The names of a text's prefixes, under which checkpoints of states are found. Knows neither states nor memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cache_strategies.block_hashes import STATES, BlockHash, BlockHasher
from cache_strategies.types import Salt


class PrefixNames:
    """The names of a text's prefixes: hashes of whole blocks, which are computed on demand."""

    def __init__(self, hasher: BlockHasher | None, tokens: Sequence[int], salt: Salt) -> None:
        """Name the prefixes of a text; without a hasher none has a name."""
        self._hasher, self._tokens, self.salt = hasher, list(tokens), salt
        self._names: list[BlockHash] = []  # of the first blocks

    def fork(self, num_tokens: int) -> PrefixNames:
        """Return the names of a text that begins with the first tokens of this one."""
        return PrefixNames(self._hasher, self._tokens[:num_tokens], self.salt)

    def replace(self, first: int, ids: Sequence[int]) -> None:
        """Replace the tokens from `first` on, as far as `ids` go."""
        self._tokens[first : first + len(ids)] = ids
        if self._hasher is not None:
            del self._names[first // self._hasher.block_size :]

    def disable(self) -> None:
        """Return no names from now on."""
        self._hasher = None

    def is_boundary(self, num_tokens: int) -> bool:
        """Return whether a prefix of so many tokens is whole blocks, so that it may have a name."""
        return self._hasher is not None and num_tokens % self._hasher.block_size == 0

    def list_names(self, num_tokens: int) -> Iterator[tuple[int, BlockHash]]:
        """Yield the numbers of tokens and the names of all prefixes of at most so many tokens, the longest first."""
        if self._hasher is None:
            return
        size = self._hasher.block_size
        self._compute(num_tokens)
        for i in reversed(range(min(num_tokens // size, len(self._names)))):
            yield (i + 1) * size, self._names[i]

    def find(self, num_tokens: int) -> BlockHash | None:
        """Return the name of the first tokens; None if they are no whole blocks, or one is an embedding."""
        if self._hasher is None or not num_tokens or not self.is_boundary(num_tokens):
            return None
        self._compute(num_tokens)
        number = num_tokens // self._hasher.block_size
        return self._names[number - 1] if number <= len(self._names) else None

    def _compute(self, num_tokens: int) -> None:
        """Compute the missing names of prefixes of at most so many tokens."""
        assert self._hasher is not None
        names = self._names
        missing = self._tokens[len(names) * self._hasher.block_size : num_tokens]
        hashes = self._hasher.hash_blocks(missing, self.salt, names[-1] if names else None)
        names += [each._replace(group=STATES) for each in hashes]
