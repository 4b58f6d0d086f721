"""HTTP requests as bytes over plain sockets: what no well-behaved client sends."""

from __future__ import annotations

import contextlib
import socket

import httpx

from tests.patience import PATIENCE


def connect(url: str, *pieces: bytes) -> socket.socket:
    """Open a connection and send these bytes, as far as the server takes them."""
    address = httpx.URL(url)
    connection = socket.create_connection((address.host, address.port), timeout=PATIENCE)
    with contextlib.suppress(ConnectionError):  # it has answered, and listens no more
        for piece in pieces:
            connection.sendall(piece)
    return connection


def send_raw(url: str, *pieces: bytes) -> httpx.Response:
    with connect(url, *pieces) as connection:
        return read_response(connection)


def read_response(connection: socket.socket) -> httpx.Response:
    """Return the next response, which has a content-length. Raises EOFError if the connection ends instead."""
    with connection.makefile("rb") as stream:
        if not (status := stream.readline()):
            raise EOFError
        lines = [line.decode().strip().split(": ", 1) for line in iter(stream.readline, b"\r\n")]
        headers = dict(lines)
        return httpx.Response(
            int(status.split()[1]), headers=headers, content=stream.read(int(headers["content-length"]))
        )


def raw_post(body: bytes, *headers: str, length: object = None) -> bytes:
    """Return the bytes of a request for a completion. `length` False: without Content-Length."""
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if length is not False:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def raw_get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers]).encode() + b"\r\n\r\n"
