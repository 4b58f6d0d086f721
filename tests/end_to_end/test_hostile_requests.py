"""Hostile inputs against a whole server: what it answered before them, it answers after them."""

from __future__ import annotations

import contextlib

from tests.api.hostile_requests import ALL
from tests.api.raw_http import connect, raw_get, raw_post, send_raw
from tests.end_to_end.server_process import Server, eventually

REFERENCE = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 1, "seed": 7}


def test_hostile_inputs_change_nothing(tiny: Server) -> None:
    before = reference(tiny)
    used = tiny.usage("paged")
    refused = {hostile.name: send_raw(tiny.url, *hostile.sent) for hostile in ALL}
    statuses = {name: (answer.status_code, answer.json()["error"]["code"]) for name, answer in refused.items()}
    assert statuses == {hostile.name: (hostile.status, hostile.code) for hostile in ALL}
    assert tiny.usage("paged") == used
    assert reference(tiny) == before


def test_200_idle_connections_and_clients_that_leave_change_nothing(tiny: Server) -> None:
    before = reference(tiny)
    with contextlib.ExitStack() as stack:
        for part in (b"", b"G", raw_get("/health", "x: y")[:-2], raw_post(b'{"model"', length=1000)):
            for _ in range(50):
                stack.enter_context(connect(tiny.url, part))
        assert reference(tiny) == before
        assert tiny.get("/ready").status_code == 200
    for _ in range(20):
        connect(tiny.url, raw_post(b'{"model": "tiny", "prompt": "x", "max_tokens": 2000, "ignore_eos": true}')).close()
    assert reference(tiny) == before
    eventually(lambda: tiny.metric("kvmux_num_requests_running") == 0)


def reference(server: Server) -> str:
    return str(server.complete(**REFERENCE).json()["choices"][0]["text"])
