"""`kvmux health`: checks whether servers are ready, for a container's health check.

Without a URL it checks the servers that this user runs on this machine: each has written its URL to its runtime
directory (processes/runtime_directory.py), so it does not matter which settings they were started with. Imports little,
since it runs every few seconds beside a busy server.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request

from server.cli.standard_streams import print_safely
from server.processes.runtime_directory import find_running_urls

READY, NOT_READY = 0, 1  # exit codes
TIMEOUT = 4.0  # seconds to wait for a response; the HEALTHCHECK of the Docker image may take 5


def check_health(url: str | None = None, timeout: float = TIMEOUT) -> int:
    """Print whether the server at `url` is ready, or if that is None, each server of this user on this machine.

    Return 0 if there is at least one and all are ready, else 1.
    """
    urls = find_running_urls() if url is None else [url]
    if not urls:
        print_safely(
            "kvmux: no server of this user runs here; is it still starting? check another server with --url", sys.stderr
        )
        return NOT_READY
    return max([_check_server(each, timeout) for each in urls])


def _check_server(url: str, timeout: float) -> int:
    """Print whether a server is ready; return READY or NOT_READY."""
    try:
        print_safely(f"{url} is ready and serves {_read_model_name(url, timeout)}", sys.stdout)
        return READY
    except urllib.error.HTTPError as error:
        why = _read_error_message(error)
    except urllib.error.URLError as error:
        why = str(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = str(error) or type(error).__name__
    print_safely(f"kvmux: {url} is not ready: {why}", sys.stderr)
    return NOT_READY


def _read_model_name(url: str, timeout: float) -> str:
    """Return the name of the model that a server is ready to serve.

    Raises OSError, HTTPException or ValueError if the server is not ready.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{url.rstrip('/')}/ready", timeout=timeout) as answer:
        body = json.load(answer)
    if not isinstance(body, dict) or body.get("status") != "ready":
        raise ValueError("the server at this URL is not kvmux")
    return str(body.get("model"))


def _read_error_message(error: urllib.error.HTTPError) -> str:
    """Return the message in the body of an error response, or its status."""
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return f"HTTP {error.code}"
