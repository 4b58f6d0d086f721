"""Shows the progress and the smoothed loss of a training run: a bar in a terminal, otherwise a line now and then."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 15.0
LOSS_DECAY = 0.95


class Display(ABC):
    """Shows steps, with the smoothed loss, and notes."""

    def __init__(self) -> None:
        self._loss: float | None = None

    def step(self, seconds: float, words: str, loss: float) -> None:
        self._loss = loss if self._loss is None else LOSS_DECAY * self._loss + (1 - LOSS_DECAY) * loss
        self._show(seconds, f"{words}, loss {self._loss:.3f}")

    @abstractmethod
    def _show(self, seconds: float, words: str) -> None: ...

    @abstractmethod
    def note(self, words: str) -> None: ...


class LineDisplay(Display):
    def __init__(self) -> None:
        super().__init__()
        self._last = 0.0

    def _show(self, seconds: float, words: str) -> None:
        if time.monotonic() - self._last > LINE_SECONDS:
            self._last = time.monotonic()
            self.note(f"{seconds / 60:6.1f} min  {words}")

    def note(self, words: str) -> None:
        print(words, flush=True)


class BarDisplay(Display):
    def __init__(self, progress: Progress, total: float) -> None:
        super().__init__()
        self._progress, self._task = progress, progress.add_task("training", total=total)

    def _show(self, seconds: float, words: str) -> None:
        self._progress.update(self._task, completed=seconds, description=words)

    def note(self, words: str) -> None:
        self._progress.console.print(words)


@contextmanager
def open_display(total: float) -> Iterator[Display]:
    """Yield a display for a run of `total` seconds."""
    if not sys.stdout.isatty():
        yield LineDisplay()
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()) as progress:
        yield BarDisplay(progress, total)
