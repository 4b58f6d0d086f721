"""Malicious and malformed requests, with the status that is due. For the fake engine, and for a real server."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from tests.api.payloads import VALID_REQUEST
from tests.api.raw_http import raw_get, raw_post

MEGABYTE = b"a" * 2**20


class HostileRequest(NamedTuple):
    name: str
    sent: Iterable[bytes]  # in pieces
    status: int
    code: str | None = None
    param: str | None = None


def completion(**change: object) -> list[bytes]:
    return [raw_post(json.dumps(VALID_REQUEST | change).encode())]


def chunked(*chunks: bytes) -> list[bytes]:
    return [raw_post(b"", "Transfer-Encoding: chunked", length=False), *chunks]


# ---------------------------------------------------------------- for the application
BODIES = [
    HostileRequest("invalid UTF-8", [raw_post(b'{"model": "tiny", "prompt": "\xff\xc0"}')], 400),
    HostileRequest("gzip that is none", [raw_post(b"\x1f\x8b\x08garbage", "Content-Encoding: gzip")], 415),
    HostileRequest("deep arrays", [raw_post(b'{"model": "tiny", "prompt": ' + b"[" * 100_000)], 400),
    HostileRequest("deep objects", [raw_post(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)], 400),
    HostileRequest(
        "100,000 digits", [raw_post(b'{"model": "tiny", "prompt": "x", "seed": ' + b"7" * 100_000 + b"}")], 400
    ),
    HostileRequest("NaN", [raw_post(b'{"model": "tiny", "prompt": "x", "temperature": NaN}')], 400),
    HostileRequest("Infinity", [raw_post(b'{"model": "tiny", "prompt": "x", "top_p": -Infinity}')], 400),
    HostileRequest("more than a float", [raw_post(b'{"model": "tiny", "prompt": "x", "temperature": 1e999}')], 400),
    HostileRequest("a cut surrogate", [raw_post(b'{"model": "tiny", "prompt": "\\ud80"}')], 400),
    HostileRequest(
        "half a pair of surrogates as a key",
        [raw_post(b'{"model": "tiny", "prompt": "x", "\\udfff": 1}')],
        400,
        param="\ufffd",
    ),
    HostileRequest("true as a token", completion(prompt=[1, True]), 400, param="prompt"),
    HostileRequest("a negative token", completion(prompt=[1, -1]), 400, param="prompt"),
    HostileRequest("a token beyond the vocabulary", completion(prompt=[2**31]), 400, param="prompt"),
    HostileRequest("a token beyond 64 bits", completion(prompt=[2**80]), 400, param="prompt"),
    HostileRequest("1,000 prompts", completion(prompt=["x"] * 1000), 400, param="prompt"),
    HostileRequest("no prompts", completion(prompt=[]), 400, param="prompt"),
    HostileRequest("n 129", completion(n=129), 400, param="n"),
    HostileRequest("100,000 biases", completion(logit_bias={str(token): 1 for token in range(100_000)}), 400),
    HostileRequest("100,000 unknown fields", completion(**{f"field{number}": 1 for number in range(100_000)}), 400),
    HostileRequest(
        "5,000 biases",
        completion(logit_bias={str(token): 1 for token in range(5000)}),
        400,
        param="logit_bias",
    ),
    HostileRequest(
        "5,000 options",
        completion(stream=True, stream_options={str(i): 1 for i in range(5000)}),
        400,
        param="stream_options",
    ),
    HostileRequest("a path as the model", completion(model="../../etc/passwd"), 404, "model_not_found", "model"),
    HostileRequest("a megabyte as the model", completion(model="m" * 2**20), 404, "model_not_found", "model"),
    HostileRequest("a megabyte as the strategy", completion(kv_cache="m" * 2**20), 400, param="kv_cache"),
    HostileRequest("a form", [raw_post(b"model=tiny&prompt=x")], 400),
]
ADDRESSES = [
    HostileRequest(
        "a path in the address", [raw_get("/v1/models/..%2f..%2fetc%2fpasswd")], 404, "model_not_found", "model"
    ),
    HostileRequest(
        "a path in the address, plainly", [raw_get("/v1/models/../../etc/passwd")], 404, "model_not_found", "model"
    ),
    HostileRequest("a zero byte in the address", [raw_get("/v1/models/%00")], 404, "model_not_found", "model"),
    HostileRequest("no UTF-8 in the address", [raw_get("/v1/models/%ff%ed%a0%80")], 404, "model_not_found", "model"),
    HostileRequest("two slashes", [raw_get("//v1/models")], 404, "unknown_url"),
    HostileRequest("a long address", [raw_get("/" + "a" * 60_000)], 404, "unknown_url"),
    HostileRequest("a bad host", [b"GET /nowhere HTTP/1.1\r\nHost: [\r\n\r\n"], 404, "unknown_url"),
    HostileRequest("everything's options", [b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n"], 404, "unknown_url"),
    HostileRequest("options", [b"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"], 405, "method_not_allowed"),
    HostileRequest("trace", [b"TRACE /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"], 405, "method_not_allowed"),
]
SIZES = [
    HostileRequest("a huge Content-Length", [raw_post(b"", length=10**15)], 413, "body_too_long"),
    HostileRequest(
        "a huge body that asks first", [raw_post(b"", "Expect: 100-continue", length=10**9)], 413, "body_too_long"
    ),
    HostileRequest("a body without end", chunked(*[b"100000\r\n" + MEGABYTE + b"\r\n"] * 64), 413, "body_too_long"),
    HostileRequest("100 kB of headers", [raw_get("/health", f"x: {'a' * 100_000}")], 431, "headers_too_long"),
]

# ---------------------------------------------------------------- answered without the application
# uvicorn's parser refuses these, or would keep them for ever: server/api/http/connection.py answers.
NOT_RECEIVED = [
    HostileRequest("1 MB of headers", [b"GET /health HTTP/1.1\r\n", b"x: " + MEGABYTE], 431, "headers_too_long"),
    HostileRequest("endless headers", [b"GET / HTTP/1.1\r\n", *[b"x: aaaa\r\n" * 9999] * 99], 431, "headers_too_long"),
    HostileRequest("an address without end", [b"GET /", *[MEGABYTE] * 9], 431, "headers_too_long"),
    HostileRequest("trailers without end", chunked(b"1\r\n{\r\n0\r\nx: ", *[MEGABYTE] * 9), 431, "headers_too_long"),
    HostileRequest("an extension without end", chunked(b"1;", *[MEGABYTE] * 9), 431, "headers_too_long"),
    HostileRequest("a negative Content-Length", [raw_post(b"{}", length=-1)], 400, "invalid_http"),
    HostileRequest("a Content-Length of words", [raw_post(b"{}", length="two")], 400, "invalid_http"),
    HostileRequest("a Content-Length beyond 64 bits", [raw_post(b"{}", length=10**30)], 400, "invalid_http"),
    HostileRequest("two Content-Lengths", [raw_post(b"{}", "Content-Length: 5")], 400, "invalid_http"),
    HostileRequest("the same Content-Length twice", [raw_post(b"{}", "Content-Length: 2")], 400, "invalid_http"),
    HostileRequest("a length and chunks", [raw_post(b"0\r\n\r\n", "Transfer-Encoding: chunked")], 400, "invalid_http"),
    HostileRequest("unknown encoding", [raw_post(b"{}", "Transfer-Encoding: gzip", length=False)], 400, "invalid_http"),
    HostileRequest("chunks that are none", chunked(b"zz\r\n{}"), 400, "invalid_http"),
    HostileRequest("a chunk beyond 64 bits", chunked(b"f" * 20 + b"\r\n{}"), 400, "invalid_http"),
    HostileRequest("a header in two lines", [raw_get("/health", "x: a\r\n b")], 400, "invalid_http"),
    HostileRequest("no ASCII in the address", [b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n"], 400, "invalid_http"),
    HostileRequest("an unknown method", [b"FETCH / HTTP/1.1\r\nHost: x\r\n\r\n"], 400, "invalid_http"),
    HostileRequest("a proxy's method", [b"CONNECT a:1 HTTP/1.1\r\n\r\n"], 400, "invalid_http"),
    HostileRequest("HTTP/2", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], 400, "invalid_http"),
    HostileRequest("TLS", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], 400, "invalid_http"),
]  # fmt: skip
ALL = [*BODIES, *ADDRESSES, *SIZES, *NOT_RECEIVED]
