"""llama.cpp's fields about speed: how much of a prompt is computed, and how fast prompt and output were."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.engine.ipc.messages import FromEngine, Progress, Submit, Tokens
from tests.api.conftest import Encode
from tests.api.fake_engine import FakeEngine, admitted, generates
from tests.api.payloads import chunks_of

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "tiny", "prompt": "hello hello"},
    CHATS: {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
}
paths = pytest.mark.parametrize("path", BODIES)


@paths
@pytest.mark.parametrize("choices", [1, 2])
def test_progress_of_a_prompt(engine: FakeEngine, http: httpx.Client, encode: Encode, path: str, choices: int) -> None:
    def compute_in_parts(submit: Submit) -> list[list[FromEngine]]:
        name = submit.request_id
        events = [admitted(submit, 2), Progress(name, 3), Progress(name, len(submit.prompt))]
        answer = [[Tokens(name, [token], None)] for token in encode("hello")]
        return [*([event] for event in events), *answer, [Tokens(name, [], "length")]]

    engine.script = compute_in_parts
    chunks = chunks_of(http.post(path, json=BODIES[path] | {"stream": True, "return_progress": True, "n": choices}))
    submits = engine.all(Submit)
    assert all(submit.reports_progress for submit in submits)
    total = len(submits[0].prompt)
    for index in range(choices):
        own = [chunk for chunk in chunks if [choice["index"] for choice in chunk["choices"]] == [index]]
        told = [chunk["prompt_progress"] for chunk in own if "prompt_progress" in chunk]
        assert [(each["total"], each["cache"], each["processed"]) for each in told] == [
            (total, 2, 3),
            (total, 2, total),
        ]
        assert 0 <= told[0]["time_ms"] <= told[1]["time_ms"]
        choice = [chunk["choices"][0] for chunk in own]
        text = "".join(each.get("text", "") or each.get("delta", {}).get("content", "") for each in choice)
        assert text == "hello"
    engine.begin_again(generates([100]))
    http.post(path, json=BODIES[path] | {"return_progress": True})
    assert not engine.all(Submit)[0].reports_progress, "only a stream can tell"


@paths
def test_timings(engine: FakeEngine, http: httpx.Client, encode: Encode, path: str) -> None:
    engine.script = generates(encode("hello you"), cached_tokens=2)
    whole = http.post(path, json=BODIES[path] | {"timings_per_token": True}).json()
    chunks = chunks_of(http.post(path, json=BODIES[path] | {"timings_per_token": True, "stream": True}))
    prompt, output = len(engine.all(Submit)[0].prompt), len(encode("hello you"))
    for timings in (whole["timings"], chunks[-1]["timings"]):
        assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (2, prompt - 2, output)
        assert timings["prompt_ms"] > 0
        assert timings["prompt_per_second"] == pytest.approx(1000 * timings["prompt_n"] / timings["prompt_ms"])
        assert timings["prompt_per_token_ms"] == pytest.approx(timings["prompt_ms"] / timings["prompt_n"])
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == sorted(
        chunk["timings"]["predicted_n"] for chunk in chunks
    )
    assert "timings" not in http.post(path, json=BODIES[path]).json()
