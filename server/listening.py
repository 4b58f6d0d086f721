"""The socket that the server listens on, and what to change where it cannot. Knows no setting."""

from __future__ import annotations

import errno
import os
import socket

BACKLOG = 2048  # connections the system holds while the workers are busy or still starting


class ListenError(Exception):
    """The address cannot be listened on; the message tells the user what to change."""


def listen(host: str, port: int) -> socket.socket:
    """The server's listening socket, made before anything slow so that an unusable address is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        socket.getaddrinfo(host, port, family)  # create_server hides that it is the name that is wrong
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise ListenError(f"cannot listen on {host}, port {port}: {_listen_advice(error, port)}") from None


def _listen_advice(error: OSError, port: int) -> str:
    if isinstance(error, socket.gaierror):
        return "no such address; see --host"
    if error.errno == errno.EADDRINUSE:
        return f"the port is in use; choose another (--port {port % 65535 + 1}), or any that is free (--port 0)"
    if error.errno == errno.EACCES:
        return "not allowed; choose a port above 1023 (--port 8000)"
    return f"{os.strerror(error.errno or 0)}; see --host and --port"


def url_of(listener: socket.socket) -> str:
    """Where this machine's own clients find the server."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
