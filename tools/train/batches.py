"""Makes training batches in order, in this process or ahead of time in worker processes.

Each batch has its own seed, made of the run's seed and the batch's index; so a resumed run continues with new text.
"""

from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenizers import Tokenizer

from tools.train.corpus.packing import Mix, PackedRows, pack

PREFETCH_PER_WORKER = 4


@cache
def _load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def _make_batch(tokenizer: Path, seed: str, context: int, rows: int, mix: Mix) -> PackedRows:
    return pack(_load_tokenizer(tokenizer), seed, context, rows, mix)


class BatchSource:
    def __init__(self, tokenizer: Path, seed: int, first: int, workers: int) -> None:
        self._tokenizer, self._seed, self._index = tokenizer, seed, first
        self._pool = ProcessPoolExecutor(workers) if workers else None
        self._prefetched: deque[Future[PackedRows]] = deque()
        self._prefetch_depth = workers * PREFETCH_PER_WORKER

    def next(self, context: int, rows: int, mix: Mix) -> PackedRows:
        """Return the next batch; with workers, a prefetched one, with the arguments of an earlier call."""
        if self._pool is None:
            return _make_batch(self._tokenizer, self._next_seed(), context, rows, mix)
        while len(self._prefetched) <= self._prefetch_depth:
            self._prefetched.append(
                self._pool.submit(_make_batch, self._tokenizer, self._next_seed(), context, rows, mix)
            )
        return self._prefetched.popleft().result()

    def _next_seed(self) -> str:
        self._index += 1
        return f"{self._seed}/{self._index}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
