"""`LLM`, a model without a server: it writes what the server writes. Its arguments, its memory, its document."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from config.errors import SettingsError
from server.api.openai.request_models import SamplingRequest
from server.llm import LLM, SamplingOptions
from server.text.errors import GrammarError
from tests.end_to_end.server_process import Server, serving
from tests.engine.expected_tokens import random_prompt
from tests.models.random_models import save_random_model

DOC = Path(__file__).parents[2] / "docs" / "guide" / "offline_inference.md"
STRATEGIES = {
    "paged": {"kind": "paged", "block_size": 8},
    "contiguous": {"kind": "contiguous"},
    "window": {"kind": "sliding_window", "window": 24, "sinks": 2},
    "int8": {"kind": "paged", "kv_dtype": "int8"},
}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "kv_memory": "64MiB",
    "max_seq_len": 256,
    "max_num_batched_tokens": 32,
    "weights_cache": "off",
    "strategies": STRATEGIES,
}
SCHEMA = {
    "type": "object",
    "properties": {"hero": {"type": "string", "maxLength": 8}, "pets": {"enum": [0, 1, 22]}},
    "required": ["hero", "pets"],
    "additionalProperties": False,
}
PROMPT = "Once upon a time there was a dog who liked to run in the park. One day "


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**SETTINGS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same settings."""
    file = tmp_path_factory.mktemp("settings") / "kvmux.toml"
    tables = [f"[strategies.{name}]\n" + _toml(options) for name, options in STRATEGIES.items()]
    file.write_text(_toml({k: v for k, v in SETTINGS.items() if k != "strategies"}) + "\n".join(tables))
    with serving("--config", str(file)) as server:
        yield server


def _toml(values: dict[str, Any]) -> str:
    return "".join(f"{name} = {value!r}\n" for name, value in values.items())


# ---------------------------------------------------------------- texts that have to be something
@pytest.mark.parametrize("strategy", ["paged", "window"])
def test_structured_outputs(llm: LLM, server: Server, strategy: str) -> None:
    """The same text as the server's, by the same grammar."""
    for seed in range(3):
        wanted: dict[str, Any] = {"max_tokens": 120, "seed": seed, "structured_outputs": {"json": SCHEMA}}
        ours = llm.generate(PROMPT, kv_cache=strategy, **wanted)
        theirs = server.complete(prompt=PROMPT, kv_cache=strategy, **wanted).json()["choices"][0]
        assert (ours.text, ours.finish_reason) == (theirs["text"], theirs["finish_reason"])
        value = json.loads(ours.text)
        assert value.keys() == {"hero", "pets"}
        assert value["pets"] in (0, 1, 22)
        streamed = [piece.text for piece in llm.stream(PROMPT, kv_cache=strategy, **wanted)]
        assert "".join(streamed) == ours.text


def test_structured_outputs_that_cannot_be_used(llm: LLM) -> None:
    for outputs, message in (
        ({"json": {"not": {}}}, "structured_outputs: .*not"),
        ({"regex": "("}, "regular expression"),
        ({"regex": "a", "choice": ["b"]}, "should have one of"),
        ({"jason": {}}, "jason"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(PROMPT, structured_outputs=outputs)
    (letter,) = llm.encode("z")[-1:]
    with pytest.raises(GrammarError, match="allows no token"):
        llm.generate(PROMPT, structured_outputs={"choice": ["yes"]}, allowed_token_ids=[letter])


# ---------------------------------------------------------------- the same text as the server's
@pytest.mark.parametrize("kv_cache", STRATEGIES)
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 11, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1},
        {"seed": 12, "stop": ["e", "."], "min_tokens": 5, "include_stop_str_in_output": True},
        {"seed": 13, "logit_bias": {300: 5.0}, "stop_token_ids": [15], "ignore_eos": True, "min_p": 0.02},
    ],
    ids=["greedy", "drawn", "stop strings", "stop tokens"],
)
def test_the_text_is_the_servers(llm: LLM, server: Server, kv_cache: str, sampling: Any) -> None:
    for prompt in (PROMPT, llm.encode(PROMPT)[:3]):
        found = llm.generate(prompt, max_tokens=40, kv_cache=kv_cache, **sampling)
        asked = sampling | ({"logit_bias": {"300": 5.0}} if "logit_bias" in sampling else {})
        body = server.complete(prompt=prompt, max_tokens=40, kv_cache=kv_cache, return_token_ids=True, **asked).json()
        choice = body["choices"][0]
        assert found.text == choice["text"]
        assert found.token_ids == choice["token_ids"]
        assert found.finish_reason == choice["finish_reason"]
        assert found.prompt_token_ids == choice["prompt_token_ids"]
        assert found.kv_cache == body["kv_cache"]["instance"] == kv_cache


def test_pieces_are_the_whole_and_come_when_they_are_asked_for(llm: LLM) -> None:
    whole = llm.generate(PROMPT, max_tokens=20, temperature=0)
    stream = llm.stream(PROMPT, max_tokens=20, temperature=0)
    pieces = [next(stream)]
    assert llm.engine.core.instances["paged"].usage().seats == 1
    pieces += stream
    assert llm.engine.core.instances["paged"].usage().seats == 0
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.token_id for piece in pieces] == whole.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * 19 + ["length"]


def test_the_text_is_that_of_transformers(tmp_path: Path) -> None:
    theirs: Any = save_random_model("gpt2", tmp_path)  # which transformers computes here, too
    prompt = random_prompt(30)
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)[0, 30:]
    llm = LLM(str(tmp_path), **SETTINGS)
    for kv_cache in ("paged", "contiguous"):
        for form in (prompt, torch.tensor(prompt), tuple(prompt)):
            assert llm.generate(form, max_tokens=20, temperature=0, kv_cache=kv_cache).token_ids == expected.tolist()


def test_rules_choose_as_in_the_server(llm: LLM) -> None:
    assert llm.generate("a", max_tokens=1).kv_cache == "paged"
    rules = [{"use": "window", "min_prompt_tokens": 10}]
    other = LLM(**SETTINGS, rules=rules, default_strategy="contiguous")
    assert other.generate("a", max_tokens=1).kv_cache == "contiguous"
    assert other.generate(PROMPT, max_tokens=1).kv_cache == "window"


def test_without_a_seed_texts_differ_and_with_one_they_do_not(llm: LLM) -> None:
    texts = {llm.generate(PROMPT, max_tokens=20, temperature=1.5).text for _ in range(4)}
    assert len(texts) > 1
    assert len({llm.generate(PROMPT, max_tokens=20, temperature=1.5, seed=-7).text for _ in range(3)}) == 1


# ---------------------------------------------------------------- arguments
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"temperature": 9}, "temperature: should be 2 or less"),
        ({"temperature": 9, "top_p": 0.0}, "temperature: .*; top_p: "),
        ({"stop": [5]}, r"stop\.0: should be a text"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: should have token ids for keys"),
        ({"logit_bias": 3}, "logit_bias: "),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias: token ids should be from 0 to"),
        ({"kv_cache": "page"}, "there is no cache strategy 'page'; there are contiguous, int8, paged, .*window"),
        ({"max_tokens": 300}, "the context is 256"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": 17}, r"min_tokens is 17, more than max_tokens \(16\)"),
        ({"allowed_token_ids": [5, 10**6]}, "allowed_token_ids: token ids should be from 0 to"),
        ({"allowed_token_ids": []}, "allowed_token_ids: should have at least one token id"),
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2}, "all of them end the text"),
        ({"prompt": "\ud83d"}, "prompt: the model's tokenizer fails on this text"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_stream_begins(llm: LLM, arguments: Any, says: str) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(ValueError, match=says):
            call(**{"prompt": "a"} | arguments)


def test_no_other_token_than_the_allowed_ones_is_drawn(llm: LLM) -> None:
    drawn = llm.generate(PROMPT, max_tokens=20, temperature=2, allowed_token_ids=[5, 6, 7], logit_bias={8: 100})
    assert {5, 6, 7} >= {*drawn.token_ids}
    assert len(drawn.token_ids) == 20


def test_unknown_names_are_refused(llm: LLM) -> None:
    wrong: Any = {"temprature": 1.0}
    with pytest.raises(TypeError, match="'temprature' is not a sampling parameter; did you mean temperature"):
        llm.generate("a", **wrong)
    with pytest.raises(SettingsError, match=r"^max_seq_length is not a setting; did you mean max_seq_len"):
        LLM(max_seq_length=3)  # "(from --max-seq-length)" would name a flag that the caller has not written
    with pytest.raises(TypeError):
        llm.generate([1.5])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        llm.generate("a", max_tokens=1.5)  # type: ignore[arg-type]


def test_sampling_parameters_are_those_of_the_http_api() -> None:
    of_http = {"n", "spaces_between_special_tokens"}
    assert SamplingOptions.__annotations__.keys() <= SamplingRequest.model_fields.keys()
    assert of_http.isdisjoint(SamplingOptions.__annotations__)


# ---------------------------------------------------------------- memory
def test_the_memory_is_free_when_the_object_is_gone(tmp_path: Path) -> None:
    save_random_model("llama", tmp_path)
    llm = LLM(str(tmp_path), **SETTINGS)
    llm.generate([5, 6], max_tokens=3)
    memory, model = weakref.ref(llm.engine.core.memory), weakref.ref(llm.engine.core.model)
    del llm
    gc.collect()
    assert memory() is None
    assert model() is None


# ---------------------------------------------------------------- the document
def test_the_documents_programs_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMUX_THREADS", "1")  # as for all tests
    found: dict[str, Any] = {}
    programs = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert len(programs) == 2
    for code in programs:
        exec(compile(code, str(DOC), "exec"), found)
    printed = capsys.readouterr().out
    assert found["answer"].text in printed
    assert found["tokens"] == found["answer"].token_ids
