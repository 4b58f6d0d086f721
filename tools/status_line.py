"""Shows what a long program is doing, in one line on a terminal, and in a line for each step in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Show a status on standard error until the block ends; yield a function that takes its text."""
    with Console(stderr=True).status("starting") as status:

        def show(text: str) -> None:
            status.update(text)
            if not status.console.is_terminal:  # where no line can be replaced, such as in a log
                print(text, file=sys.stderr, flush=True)

        yield show
