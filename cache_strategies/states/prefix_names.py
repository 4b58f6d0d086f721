"""The names of a text's prefixes, under which checkpoints of states are found. Knows neither states nor memory."""

from __future__ import annotations

from collections.abc import Sequence

from cache_strategies.block_hashes import STATES, BlockHash, BlockHasher
from cache_strategies.types import Salt


class PrefixNames:
    """The names of a text's prefixes: hashes of whole blocks, computed when they are asked for."""

    def __init__(self, hasher: BlockHasher | None, tokens: Sequence[int], salt: Salt) -> None:
        """Name the prefixes of a text; without a hasher none has a name."""
        self._hasher, self._tokens, self.salt = hasher, list(tokens), salt
        self._hashes: list[BlockHash] = []  # of the first blocks

    def fork(self, num_tokens: int) -> PrefixNames:
        """Return the names of a text that begins with the first tokens of this one."""
        return PrefixNames(self._hasher, self._tokens[:num_tokens], self.salt)

    def replace(self, first: int, ids: Sequence[int]) -> None:
        """Let the tokens from `first` on be these, as far as they go."""
        self._tokens[first : first + len(ids)] = ids
        if self._hasher is not None:
            del self._hashes[first // self._hasher.block_size :]

    def can_name(self, num_tokens: int) -> bool:
        """Return whether a prefix of so many tokens may have a name."""
        return self._hasher is not None and num_tokens % self._hasher.block_size == 0

    def stop(self) -> None:
        """Give no more names."""
        self._hasher = None

    def list_names(self, num_tokens: int) -> Sequence[tuple[int, BlockHash]]:
        """Return the numbers of tokens and the names of all prefixes of at most so many tokens, the longest first."""
        hasher, hashes = self._hasher, self._hashes
        if hasher is None:
            return []
        size = hasher.block_size
        for end in range((len(hashes) + 1) * size, num_tokens + 1, size):
            parent = hashes[-1] if hashes else hasher.root_hash(self.salt)
            found = hasher.hash_block_tokens(parent, self._tokens[end - size : end])
            if found is None:  # an embedding without a token id
                break
            hashes.append(found._replace(group=STATES))
        return [((i + 1) * size, hashes[i]) for i in reversed(range(min(num_tokens // size, len(hashes))))]

    def find(self, num_tokens: int) -> BlockHash | None:
        """Return the name of the first tokens; None if they are no whole number of blocks, or one has no id."""
        last = next(iter(self.list_names(num_tokens)), None)
        return last[1] if last is not None and last[0] == num_tokens else None
