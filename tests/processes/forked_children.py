"""Forks the children of a supervisor, instead of starting Python anew for each: `Supervisor(..., context=FORK)`."""

from __future__ import annotations

import logging
import signal
import sys
from multiprocessing.context import ForkContext, ForkProcess


class ForkedChild(ForkProcess):
    """A child that shares neither logging nor signals with the supervisor."""

    def run(self) -> None:
        logging.getLogger().handlers.clear()  # the thread that writes the log stays in the supervisor
        sys.stderr = sys.__stderr__
        signal.set_wakeup_fd(-1)  # on which the supervisor hears of its own signals
        try:
            super().run()
        finally:
            logging.shutdown()  # a forked process ends without what `atexit` has


class _Context(ForkContext):
    Process = ForkedChild


FORK = _Context()
