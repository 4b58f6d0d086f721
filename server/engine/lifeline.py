"""What every process of the server does first: it logs in the common format and ends when its supervisor does.

Knows nothing of what the process is for; it is named by an import string, so that the supervisor need not import it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pkgutil
import sys
import threading
from typing import Any

from config.settings import SettingsError

log = logging.getLogger(__name__)

USER_ERROR = 2  # exit code: something the user can change
LOG_FORMAT = "%(asctime)s %(levelname)s %(processName)s: %(message)s"


def run_child(target: str, log_level: str, args: tuple[Any, ...]) -> None:
    """Calls `target` ("package.module:function") in a child process. A SettingsError ends it with one line."""
    end_with_parent()
    configure_logging(log_level)
    try:
        pkgutil.resolve_name(target)(*args)
    except SettingsError as error:
        log.error("%s", error)
        sys.exit(USER_ERROR)


def configure_logging(level: str) -> None:
    logging.basicConfig(format=LOG_FORMAT, level=level.upper())


def end_with_parent() -> None:
    """Ends this process at once when its parent dies, also by SIGKILL; does nothing in a process without a parent."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()  # the end of a pipe that only the parent holds open
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
