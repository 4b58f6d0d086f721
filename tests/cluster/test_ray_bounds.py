"""Which bounds of a single server's connections still hold behind Ray's proxy, and which do not.

docs/operations/cluster.md lists them. What does not hold is tested, too, so that the list is right.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.cluster.ray_cluster import Cluster, running
from tests.end_to_end.server_process import PATIENCE, eventually

pytestmark = pytest.mark.ray

SECONDS = 2  # header_timeout and body_timeout
BODY = b'{"prompt": "Once", "max_tokens": 1}'


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    bounds = ("--max-header-bytes", "4096", "--header-timeout", str(SECONDS), "--body-timeout", str(SECONDS))
    with running("--host", "0.0.0.0", "--kv-memory", "32MiB", "--max-body-bytes", "20000", *bounds) as started:
        started.wait_for_replicas(1)
        yield started


def connect(cluster: Cluster) -> socket.socket:
    host, _, port = cluster.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def make_head(length: int) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    return head.encode() + b"\r\n"


def read_status(connection: socket.socket) -> str:
    return connection.recv(4096).split(b"\r\n")[0].decode()


def test_the_length_of_headers_is_bounded(cluster: Cluster) -> None:
    response = httpx.get(f"{cluster.url}/v1/models", headers={"x-long": "a" * 5000})
    assert response.status_code == 431
    assert response.json()["error"]["code"] == "headers_too_long"


def test_the_length_of_a_body_is_bounded(cluster: Cluster) -> None:
    response = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": "a" * 30_000})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_long")
    chunks = (b"a" * 1000 for _ in range(50))  # without a Content-Length
    response = httpx.post(f"{cluster.url}/v1/completions", content=chunks, timeout=PATIENCE)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_long")


def test_a_body_that_stops_is_refused(cluster: Cluster) -> None:
    with connect(cluster) as connection:
        connection.sendall(make_head(len(BODY)) + BODY[:10])
        assert read_status(connection) == "HTTP/1.1 408 Request Timeout"


def test_headers_that_stop_are_not_refused(cluster: Cluster) -> None:
    with connect(cluster) as connection:
        connection.sendall(make_head(len(BODY))[:40])
        time.sleep(2 * SECONDS)
        connection.sendall(make_head(len(BODY))[40:] + BODY)
        assert read_status(connection) == "HTTP/1.1 200 OK", "if this fails, the documentation can promise more"


def test_a_client_that_does_not_read_keeps_no_request(cluster: Cluster) -> None:
    """Its connection is not closed, but the request ends: the proxy keeps what was not read."""
    body = b'{"prompt": "Once", "max_tokens": 1900, "ignore_eos": true, "stream": true, "logprobs": 5}'
    with connect(cluster) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(make_head(len(body)) + body)
        eventually(lambda: cluster.metric("kvmux_num_requests_running") == 1)
        eventually(lambda: cluster.metric("kvmux_num_requests_running") == 0)


def test_bytes_that_are_not_http_do_no_harm(cluster: Cluster) -> None:
    with connect(cluster) as connection:
        connection.sendall(b"\x00\x01 nonsense\r\n\r\n")
        assert read_status(connection) == "HTTP/1.1 400 Bad Request"
    assert cluster.get("/health").status_code == 200


def test_the_live_state_is_for_this_machine_alone_without_a_token(cluster: Cluster) -> None:
    assert cluster.get("/v1/live").status_code == 200
    addresses = [each.address for all_ in psutil.net_if_addrs().values() for each in all_ if each.family == 2]
    others = [each for each in addresses if not each.startswith("127.")]
    if not others:
        pytest.skip("this machine has no other address")
    port = cluster.url.rpartition(":")[2]
    refused = httpx.get(f"http://{others[0]}:{port}/v1/live", headers={"x-forwarded-for": "198.51.100.1"})
    assert refused.status_code == 403
