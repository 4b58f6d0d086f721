"""Requests byte by byte, over sockets of one's own: what no well-behaved client sends."""

from __future__ import annotations

import contextlib
import socket

import httpx

PATIENCE = 20.0  # seconds


def connect(url: str, *pieces: bytes) -> socket.socket:
    """A connection on which these were sent, as far as the server took them."""
    address = httpx.URL(url)
    connection = socket.create_connection((address.host, address.port), timeout=PATIENCE)
    with contextlib.suppress(ConnectionError):  # it has answered, and listens no more
        for piece in pieces:
            connection.sendall(piece)
    return connection


def answer_to(url: str, *pieces: bytes) -> httpx.Response:
    with connect(url, *pieces) as connection:
        return read(connection)


def read(connection: socket.socket) -> httpx.Response:
    """The next answer, which has a content-length. Raises EOFError if the connection ends instead."""
    with connection.makefile("rb") as stream:
        if not (status := stream.readline()):
            raise EOFError
        lines = [line.decode().strip().split(": ", 1) for line in iter(stream.readline, b"\r\n")]
        headers = dict(lines)
        return httpx.Response(
            int(status.split()[1]), headers=headers, content=stream.read(int(headers["content-length"]))
        )


def post(body: bytes, *headers: str, length: object = None) -> bytes:
    """A request for a completion."""
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if length is not False:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers]).encode() + b"\r\n\r\n"
