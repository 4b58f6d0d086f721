"""The listening socket of the server, and advice for errors such as a used port."""

from __future__ import annotations

import errno
import os
import socket

BACKLOG = 2048  # maximum number of connections that the system holds until a worker accepts them


class ListenError(Exception):
    """An address cannot be listened on; the message tells the user what to change."""


def listen(host: str, port: int, settings: str = "") -> socket.socket:
    """Return a listening socket, made before anything slow so that an unusable address is reported at once.

    `settings` is the prefix of the settings `host` and `port`, for error messages.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        # getaddrinfo raises gaierror for an unknown host name; errors of create_server do not tell that cause
        socket.getaddrinfo(host, port, family)
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        advice = _listen_advice(error, port, settings)
        raise ListenError(f"cannot listen on {host:.300}, port {port}: {advice}") from None


def _listen_advice(error: OSError | UnicodeError, port: int, settings: str) -> str:
    # UnicodeError: the name has characters that host names cannot have
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return f"no such address; see --{settings}host"
    flag = f"--{settings}port"
    if error.errno == errno.EADDRINUSE:
        return f"the port is in use; choose another ({flag} {port % 65535 + 1}), or let the system choose ({flag} 0)"
    if error.errno == errno.EACCES:
        return f"not allowed; choose a port above 1023 ({flag} 8000)"
    return f"{os.strerror(error.errno or 0)}; see --{settings}host and {flag}"


def get_url(listener: socket.socket) -> str:
    """Return the URL at which clients on this machine reach the server."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
