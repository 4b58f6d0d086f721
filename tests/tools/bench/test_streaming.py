"""The benchmark of streams has a figure of both endpoints, and of a bare server beside each."""

from __future__ import annotations

import json

import pytest

from tools.bench import streaming


@pytest.mark.apart
def test_both_endpoints_beside_a_bare_server(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--", "--kv-memory", "64MiB", "--threads", "1"]
    streaming.main(["--streams", "2", "--tokens", "64", "--rounds", "2", "--json", *flags])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["path"], each["streams"]) for each in found] == [(path, 2) for path in streaming.BODIES]
    for each in found:
        assert 0 < each["microseconds"] < 1e5
        assert each["bare"] >= 0, "told in hundredths of a second, so a quick server may have none"
        assert each["tokens_per_second"] > 0
