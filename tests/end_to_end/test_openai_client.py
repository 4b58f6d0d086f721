"""The official openai client against the whole server: real processes, real sockets, the embedded model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai

from tests.end_to_end.server_process import Server, eventually, maps, metric

PROMPT = "Once upon a time there was a"
STRATEGIES = ("contiguous", "paged", "sliding_window")


def test_plain(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer._request_id


def test_a_stream_says_what_the_plain_answer_says(client: openai.OpenAI) -> None:
    wanted = {"model": "tiny:paged", "prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 3}
    plain = client.completions.create(**wanted)
    chunks = list(client.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == plain.choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert len(chunks) > 10


def test_a_request_chooses_its_strategy_and_is_told(client: openai.OpenAI) -> None:
    for strategy in STRATEGIES:
        by_alias = client.completions.create(model=f"tiny:{strategy}", prompt=PROMPT, max_tokens=2)
        assert by_alias.model_extra["kv_cache"]["instance"] == strategy
        by_body = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=2, extra_body={"kv_cache": strategy}
        )
        assert by_body.model_extra["kv_cache"] | {"cached_tokens": 0} == {
            "instance": strategy,
            "reason": "request",
            "cached_tokens": 0,
        }


def test_cancelled_in_mid_stream_it_leaves_nothing_behind(client: openai.OpenAI, tiny: Server) -> None:
    before = tiny.metric("kvmux_requests_total", outcome="cancelled")
    with client.completions.create(
        model="tiny:contiguous", prompt=PROMPT, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        for _, _chunk in zip(range(5), stream, strict=False):
            pass
    eventually(lambda: tiny.usage("contiguous")["seats"] == 0)
    now, usage = tiny.metrics(), tiny.usage("contiguous")
    assert metric(now, "kvmux_requests_total", outcome="cancelled") == before + 1
    assert usage["used"] == usage["wasted"] == 0
    assert metric(now, "kvmux_num_requests_running") == 0


def test_32_at_once_over_three_strategies_answer_as_each_does_alone(client: openai.OpenAI, tiny: Server) -> None:
    def ask(i: int) -> str:
        answer = client.completions.create(
            model=f"tiny:{STRATEGIES[i % 3]}",
            prompt=f"{PROMPT} {'very ' * (i % 7)}small {i}",
            max_tokens=40,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, range(32)))
    now = tiny.metrics()
    assert metric(now, "kvmux_step_rows_count") > metric(now, "kvmux_step_rows_bucket", le="8.0")
    assert metric(now, "kvmux_step_rows_bucket", le="+Inf") > metric(now, "kvmux_step_rows_bucket", le="16.0")
    assert [ask(i) for i in range(32)] == together


def test_n_choices_are_seeded_one_by_one(client: openai.OpenAI) -> None:
    three = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, n=3, seed=11, temperature=1)
    second = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, seed=12, temperature=1)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert three.choices[1].text == second.choices[0].text


def test_unknown_strategies_are_refused_with_their_names(tiny: Server) -> None:
    answer = tiny.complete(prompt="x", kv_cache="magnetic")
    assert answer.status_code == 400
    assert all(name in answer.json()["error"]["message"] for name in ("magnetic", *STRATEGIES))


def test_only_the_engine_has_torch_in_its_memory(tiny: Server) -> None:
    others = [p for p in (tiny.process, *tiny.process.children(recursive=True)) if p != tiny.engine]
    assert len(others) >= 2  # supervisor and a worker
    assert not [p for p in others if maps(p, "libtorch")]


def test_a_stop_string_is_no_cancellation(client: openai.OpenAI, tiny: Server) -> None:
    now = tiny.metrics()
    before = [metric(now, "kvmux_requests_total", outcome=outcome) for outcome in ("stop", "cancelled")]
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=400, temperature=0, stop=["a", "e"])
    assert answer.choices[0].finish_reason == "stop"
    eventually(lambda: tiny.metric("kvmux_requests_total", outcome="stop") == before[0] + 1)
    assert tiny.metric("kvmux_requests_total", outcome="cancelled") == before[1]


def test_extreme_values_harm_nobody(tiny: Server) -> None:
    assert tiny.complete(prompt="a", temperature=1, top_p=1e-300, max_tokens=2).status_code == 200
    refused = tiny.complete(prompt="a", kv_cache="\x7f" * 100_000)
    assert refused.status_code == 400
    assert len(refused.content) < 2000
    assert tiny.get("/ready").status_code == 200


def test_a_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello! How are you?"}]
    plain = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_completion_tokens=40)
    assert plain.choices[0].message.content
    stream = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_completion_tokens=40, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream) == plain.choices[0].message.content
