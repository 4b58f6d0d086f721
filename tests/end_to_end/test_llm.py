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
from server.engine.instance_reports import read_usage
from server.llm import LLM, GenerationError, SamplingOptions
from server.text.errors import GrammarError
from tests.end_to_end.server_process import Server, serving
from tests.engine.expected_tokens import random_prompt
from tests.models.random_models import save_random_model

DOC = Path(__file__).parents[2] / "docs" / "guide" / "offline_inference.md"
STRATEGIES = {
    "paged": {"kind": "paged", "block_size": 8},
    "contiguous": {"kind": "contiguous"},
    "window": {"kind": "sliding_window", "window": 24, "sinks": 2},
    "int8": {"kind": "paged", "k_dtype": "int8", "v_dtype": "int8"},
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
    assert read_usage(llm.engine.core.instances["paged"]).seats == 1
    pieces += stream
    assert read_usage(llm.engine.core.instances["paged"]).seats == 0
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
        ({"max_tokens": 300}, "more than max_seq_len=256: shorten the prompt or lower max_tokens"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [5, 10**6]}, "prompt: token ids should be from 0 to"),
        ({"prompt": [-1]}, "prompt: token ids should be from 0 to"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids: token ids should be from 0 to"),
        ({"logprobs": -1}, "logprobs is -1"),
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


@pytest.mark.parametrize("n", [0, -1])
def test_a_number_of_texts_that_makes_no_sense_is_refused(llm: LLM, n: int) -> None:
    with pytest.raises(ValueError, match=f"n is {n}: ask for at least one"):
        llm.generate_batch(["a"], n=n)
    assert nothing_is_left(llm)


def test_one_wrong_prompt_of_a_batch_refuses_all(llm: LLM) -> None:
    with pytest.raises(ValueError, match="max_seq_len=256"):
        llm.generate_batch([PROMPT, [5] * 300, PROMPT], max_tokens=5)
    assert nothing_is_left(llm)


def test_no_other_token_than_the_allowed_ones_is_drawn(llm: LLM) -> None:
    drawn = llm.generate(PROMPT, max_tokens=20, temperature=2, allowed_token_ids=[5, 6, 7], logit_bias={8: 100})
    assert {5, 6, 7} >= {*drawn.token_ids}
    assert len(drawn.token_ids) == 20


# ---------------------------------------------------------------- many texts at a time
def nothing_is_left(llm: LLM) -> bool:
    """Return whether no request is left, and no memory is in use."""
    core = llm.engine.core
    usages = [read_usage(instance) for instance in core.instances.values()]
    core.check_integrity()
    return not core.busy and all((each.seats, each.tokens, each.used) == (0, 0, 0) for each in usages)


def test_a_batch_has_the_texts_of_single_calls_in_fewer_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = llm.engine.core.step

    def count_step() -> Any:
        result = step()
        steps.append(result.report.rows)
        return result

    monkeypatch.setattr(llm.engine.core, "step", count_step)
    prompts = [llm.encode(PROMPT)[: 3 + i] for i in range(10)]  # more than there are seats
    wanted: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    alone = [llm.generate(prompt, **wanted) for prompt in prompts]
    num_alone = len(steps)
    steps.clear()
    batch = llm.generate_batch(prompts, **wanted)
    assert [texts for [texts] in batch] == alone
    assert max(steps) == llm.engine.core.scheduler.limits.max_num_seqs
    assert len(steps) < num_alone / 2
    assert nothing_is_left(llm)


def test_choices_are_those_of_the_server(llm: LLM, server: Server) -> None:
    wanted: dict[str, Any] = {"n": 3, "max_tokens": 12, "seed": 4, "temperature": 1.2}
    found = llm.generate_batch([PROMPT, "The cat"], **wanted)
    for prompt, choices in zip([PROMPT, "The cat"], found, strict=True):
        theirs = server.complete(prompt=prompt, **wanted).json()["choices"]
        assert [each.text for each in choices] == [each["text"] for each in theirs]
    assert len({each.text for each in found[0]}) > 1


def test_log_probabilities_are_those_of_the_server(llm: LLM, server: Server) -> None:
    wanted: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "logprobs": 2}
    found = llm.generate(PROMPT, prompt_logprobs=1, **wanted)
    theirs = server.complete(prompt=PROMPT, prompt_logprobs=1, **wanted).json()["choices"][0]
    assert found.logprobs is not None
    assert [each.logprob for each in found.logprobs] == pytest.approx(theirs["logprobs"]["token_logprobs"])
    assert all(len(each.top_logprobs) == 2 for each in found.logprobs)
    assert found.prompt_logprobs is not None
    assert [each.token for each in found.prompt_logprobs] == found.prompt_token_ids[1:]
    for each, other in zip(found.prompt_logprobs, theirs["prompt_logprobs"][1:], strict=True):
        assert other[str(each.token)]["logprob"] == pytest.approx(each.logprob, abs=1e-4)
    streamed = [piece.logprob for piece in llm.stream(PROMPT, **wanted)]
    assert streamed == found.logprobs
    assert llm.generate(PROMPT, max_tokens=2).logprobs is None


@pytest.mark.parametrize("kv_cache", STRATEGIES)
def test_streams_run_beside_each_other_and_free_their_memory(llm: LLM, kv_cache: str) -> None:
    prompts = [random_prompt(30, seed=4), random_prompt(30, seed=4), *(random_prompt(9, seed=i) for i in range(4))]
    wanted: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "kv_cache": kv_cache}
    expected = [llm.generate(prompt, **wanted).token_ids for prompt in prompts]
    streams = [llm.stream(prompt, **wanted) for prompt in prompts]
    taken = [[next(stream).token_id for stream in streams] for _ in range(12)]
    assert [list(tokens) for tokens in zip(*taken, strict=True)] == expected
    assert [list(stream) for stream in streams] == [[]] * len(prompts)
    assert nothing_is_left(llm)


def test_a_stream_that_is_closed_or_dropped_frees_its_memory(llm: LLM) -> None:
    for closes in (True, False):
        stream = llm.stream(PROMPT, max_tokens=50, ignore_eos=True)
        next(stream)
        assert not nothing_is_left(llm)
        if closes:
            stream.close()
            assert list(stream) == []
        del stream
        gc.collect()
        assert nothing_is_left(llm)
    llm.stream(PROMPT)  # nobody takes a token of it
    assert nothing_is_left(llm)


# ---------------------------------------------------------------- what fails
@pytest.mark.parametrize("after", [0, 3])
def test_a_strategy_that_fails_ends_its_texts_alone(llm: LLM, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = llm.engine.core.instances["paged"].strategy
    wanted: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
    expected = llm.generate(PROMPT, kv_cache="contiguous", **wanted)
    failing, other = llm.stream(PROMPT, kv_cache="paged", **wanted), llm.stream(PROMPT, kv_cache="contiguous", **wanted)
    for _ in range(after):
        next(failing)
    with monkeypatch.context() as patch:
        patch.setattr(strategy, "locate", lambda rows: 1 / 0)
        with pytest.raises(GenerationError, match="paged") as failed:
            list(failing)
    assert failed.value.code == "strategy_failed"
    assert [piece.token_id for piece in other] == expected.token_ids
    assert nothing_is_left(llm)
    assert llm.generate(PROMPT, kv_cache="paged", **wanted).token_ids == expected.token_ids


def test_logits_that_are_not_finite_are_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = llm.engine.core.model.forward
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core.model, "forward", lambda ids, attention: forward(ids, attention) * torch.nan)
        with pytest.raises(GenerationError, match="logits are NaN or infinite") as failed:
            llm.generate(PROMPT)
    assert failed.value.code == "not_a_number"
    assert nothing_is_left(llm)
    assert llm.generate(PROMPT, max_tokens=3, temperature=0).text


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
    of_http = {"n", "spaces_between_special_tokens"}  # `n` is an argument of generate_batch()
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
    first = found["llm"].encode("Once")[-1:]
    expected = found["llm"].generate(first, max_tokens=8, temperature=0, ignore_eos=True, kv_cache="contiguous")
    assert found["tokens"] == expected.token_ids
