"""Servers that tests share: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.end_to_end.server_process import PATIENCE, Server, serving


@pytest.fixture(scope="session")
def tiny() -> Iterator[Server]:
    """The embedded model in float32, as `make serve` starts it otherwise."""
    with serving("--dtype", "float32", "--threads", "1", "--kv-memory", "512MiB", anew=True) as server:
        yield server


@pytest.fixture
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as client:
        yield client
