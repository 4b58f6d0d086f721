"""The first steps of every child process of the server: set up logging and signals, and end when the parent is gone.

The code that the process then runs is named by an import string, so that the supervisor need not import it.

Signals, for every process below the supervisor, at any depth:

- Only the supervisor handles SIGINT, SIGTERM and SIGHUP. systemd and a terminal send them to all processes at once, and
  a child that ended then would cut off requests that the supervisor lets finish. They are blocked in each child
  already before it starts (`block_signals`), and in all processes that a child starts; to end such a process, use
  `request_stop` or SIGKILL.
- STOP_SIGNAL (SIGUSR2) asks a child to finish its requests and end; `request_stop` sends it. A child that has not yet
  installed a handler (`signal.signal(STOP_SIGNAL, ...)`) ends at once.
- DUMP_SIGNAL (SIGUSR1) makes a child write the Python stack traces of its threads to a file beside the engine's socket.
- A child ends at once when its parent ends, even by SIGKILL (`end_with_parent`); on Linux even a stopped child does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from config.errors import SettingsError, format_error
from config.settings import Settings
from server.logs import configure_logging
from server.processes.heartbeat import Heartbeat
from server.processes.linux import die_with_parent, set_process_name

log = logging.getLogger(__name__)

FAILED, USER_ERROR = 1, 2  # exit codes; USER_ERROR: the user can fix the cause
# The signals that only the supervisor handles; they are blocked in its children.
SUPERVISOR_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
STOP_SIGNAL, DUMP_SIGNAL = signal.SIGUSR2, signal.SIGUSR1


def run_child(target: str, settings: Settings, socket_path: str, heartbeat: Heartbeat, *rest: Any) -> None:
    """Call `target` ("package.module:function") with the settings, the socket's path and `rest`.

    A thread sends heartbeats until the target calls `heartbeat.beat` itself. A SettingsError or an OSError
    of the target ends the process with one line in the log and the exit code USER_ERROR.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISOR_SIGNALS)
    set_process_name(f"kvmux-{multiprocessing.current_process().name}")
    end_with_parent()
    heartbeat.beat_while_loading()
    configure_logging(settings)
    try:
        faulthandler.register(DUMP_SIGNAL, stacks_file(socket_path, multiprocessing.current_process().name).open("w"))
        function = import_target(target)
        function(settings, socket_path, *rest)
    except SettingsError as error:
        log.error("%s", error)
        sys.exit(USER_ERROR)
    except OSError as error:  # the system has no memory, disk space or descriptors left, or denies permission
        log.error("%s", format_error(error))
        log.debug("%s failed", target, exc_info=True)
        sys.exit(USER_ERROR)
    except Exception:
        log.critical("%s failed", target, exc_info=True)
        sys.exit(FAILED)


def import_target(target: str) -> Callable[..., None]:
    """Import "module:function" with garbage collection paused; exempt the loaded objects from later collections."""
    gc.disable()
    try:
        function: Callable[..., None] = pkgutil.resolve_name(target)
        gc.freeze()
    finally:
        gc.enable()
    return function


def end_with_parent() -> None:
    """End this process at once when its parent dies, even by SIGKILL; do nothing in a process without a parent."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    die_with_parent()

    def watch() -> None:
        parent.join()  # returns when the parent has ended, as that closes a pipe that only it holds open
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block SUPERVISOR_SIGNALS in the processes that are started within the `with` block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        # Start the resource tracker now: process.start() would do it and thereby unblock SIGINT (Python 3.11).
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISOR_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def request_stop(process: BaseProcess) -> None:
    """Send a process STOP_SIGNAL, so that it finishes its work and ends; do nothing if it has ended."""
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, STOP_SIGNAL)


def stacks_file(socket_path: str, name: str) -> Path:
    """Return the path of the file to which the process called `name` writes its stack traces."""
    return Path(socket_path).with_name(f"{name}.stacks")
