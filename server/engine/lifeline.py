"""What every process of the server does first: it logs as all of them do, and ends when its supervisor does.

Knows nothing of what the process is for; it is named by an import string, so that the supervisor need not import it.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pkgutil
import sys
import threading
from collections.abc import Callable
from typing import Any

from config.errors import SettingsError
from config.settings import Settings
from server.logs import configure_logging

log = logging.getLogger(__name__)

FAILED, USER_ERROR = 1, 2  # exit codes; the second: something the user can change


def run_child(target: str, settings: Settings, *rest: Any) -> None:
    """Calls `target` ("package.module:function") with settings and rest. A SettingsError ends it with one line."""
    end_with_parent()
    configure_logging(settings)
    try:
        function = imported(target)
        function(settings, *rest)
    except SettingsError as error:
        log.error("%s", error)
        sys.exit(USER_ERROR)
    except Exception:
        log.critical("%s failed", target, exc_info=True)
        sys.exit(FAILED)


def imported(target: str) -> Callable[..., None]:
    """What the string names. Modules are no rubbish: nobody looks for any among them, neither now nor later."""
    gc.disable()
    try:
        function: Callable[..., None] = pkgutil.resolve_name(target)
        gc.freeze()
    finally:
        gc.enable()
    return function


def end_with_parent() -> None:
    """Ends this process at once when its parent dies, also by SIGKILL; does nothing in a process without a parent."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()  # the end of a pipe that only the parent holds open
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
