"""A process that has imported all that a server needs, and forks servers, so that tests need not wait for imports.

`python -m tests.end_to_end.server_template FD`: each message on the socket FD is a `ServerRequest` with the descriptor
of a file for the server's output; the answer is the server's process id. The server forks its children, too. All end
with the process that started this one.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from server.cli import main as cli
from server.processes.linux import die_with_parent
from server.processes.supervisor import Supervisor, Targets
from tests.processes.forked_children import FORK

MAX_MESSAGE = 1 << 16  # bytes
PRELOADED = ("server.api.worker", "server.processes.engine")  # by name: whoever asks for servers need not import them


class ServerRequest(NamedTuple):
    """The arguments of `kvmux`, its environment, and the functions that its children run."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    engine: str
    worker: str


def main(requests: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the servers
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_MESSAGE, 1)
        if not message:
            return  # nobody is left who could ask
        output = descriptors[0]
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            requests.close()
            run_server(ServerRequest(*json.loads(message)), output)
        os.close(output)
        requests.send(str(pid).encode())


def run_server(request: ServerRequest, output: int) -> None:
    """Become a server, and end with its exit code."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request.environment)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    cli.Supervisor = functools.partial(  # type: ignore[misc,assignment]
        Supervisor, targets=Targets(request.engine, request.worker), context=FORK
    )
    code = 1
    try:
        code = cli.main(request.arguments)
    except BaseException:
        traceback.print_exc()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
