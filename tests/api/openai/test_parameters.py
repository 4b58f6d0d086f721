"""Parameters of /v1/completions: what the engine is asked for, and how its words become OpenAI's."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import Any

import httpx
import openai
import pytest

from server.engine.ipc.messages import FromEngine, PromptScores, SamplingParams, Speculation, Submit, Tokens
from tests.api.fake_engine import FakeEngine, admitted, generates, score, scores
from tests.api.payloads import VALID_REQUEST, Encode, chunks_of
from tests.text.tiny_tokenizers import BOS, EOS, byte_level

BACKEND = byte_level()


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=VALID_REQUEST | body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def streamed(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    return chunks_of(http.post("/v1/completions", json=VALID_REQUEST | {"stream": True} | body))


# ---------------------------------------------------------------- to the engine
def test_everything_about_sampling_reaches_the_engine(engine: FakeEngine, http: httpx.Client) -> None:
    sent = {"frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.5, "min_tokens": 2, "n": 2}
    sent |= {"allowed_token_ids": [3, 300]}
    sent |= {"logit_bias": {"7": 3, "9": -100}, "stop_token_ids": [4], "logprobs": 2, "seed": 5, "temperature": 0}
    engine.script = scores([5, 6])
    ask(http, **sent)
    first, second = engine.all(Submit)
    assert first.sampling == SamplingParams(
        16,
        0,
        seed=5,
        min_tokens=2,
        stop_token_ids=(4,),
        frequency_penalty=0.5,
        presence_penalty=-1,
        repetition_penalty=1.5,
        logit_bias=((7, 3), (9, -100)),
        allowed_token_ids=array("q", [3, 300]).tobytes(),
        logprobs=2,
    )
    assert (second.sampling.seed, second.sibling_of) == (6, first.request_id)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (None, None),
        ({"num_speculative_tokens": 0}, Speculation(0)),
        ({"num_speculative_tokens": 4, "method": "ngram"}, Speculation(4, 3, 1)),
        ({"num_speculative_tokens": 16, "prompt_lookup_max": 5, "prompt_lookup_min": 2}, Speculation(16, 5, 2)),
    ],
)
def test_guesses_are_asked_for(
    engine: FakeEngine, http: httpx.Client, sent: dict[str, Any] | None, expected: Speculation | None
) -> None:
    ask(http, speculative_config=sent, n=2)
    assert [submit.speculation for submit in engine.all(Submit)] == [expected] * 2


@pytest.mark.parametrize(("stop", "text", "count"), [("never", "hello", 5), ("l", "he", 3), ("el", "h", 3)])
def test_several_tokens_may_come_at_once(
    engine: FakeEngine, http: httpx.Client, encode: Encode, stop: str, text: str, count: int
) -> None:
    """A stop string ends the text among them."""

    def script(submit: Submit) -> list[list[FromEngine]]:
        name, tokens = submit.request_id, [token for letter in "hello" for token in encode(letter)]
        return [[admitted(submit), Tokens(name, tokens[:1])], [Tokens(name, tokens[1:], "length", None, 4)]]

    engine.script = script
    result = ask(http, stop=stop)
    assert result["choices"][0]["text"] == text
    assert result["usage"]["completion_tokens"] == count
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed(http, stop=stop)) == text


def test_several_prompts_have_choices_in_their_order(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    def script(submit: Submit) -> list[list[FromEngine]]:
        tokens = [*submit.prompt[1:], *encode(submit.request_id[-1])]
        return [[admitted(submit, cached_tokens=1), Tokens(submit.request_id, tokens, "length")]]

    engine.script = script
    result = ask(http, prompt=["a", "bb"], n=2)
    assert [(c["index"], c["text"]) for c in result["choices"]] == [(0, "a0"), (1, "a1"), (2, "bb0"), (3, "bb1")]
    prompts = [submit.prompt for submit in engine.all(Submit)]
    assert prompts == [[BOS, *encode("a")]] * 2 + [[BOS, *encode("bb")]] * 2
    assert result["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[2])
    assert result["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    siblings = [submit.sibling_of for submit in engine.all(Submit)]
    heads = [submit.request_id for submit in engine.all(Submit)][::2]
    assert siblings == [None, heads[0], None, heads[1]]


def test_prompts_of_ids_too(engine: FakeEngine, http: httpx.Client) -> None:
    ask(http, prompt=[[5, 6], [7]])
    assert [submit.prompt for submit in engine.all(Submit)] == [[5, 6], [7]]


@pytest.mark.parametrize(("limit", "kept"), [(2, [6, 7]), (3, [5, 6, 7]), (9, [5, 6, 7])])
def test_a_prompt_can_be_cut_in_front(engine: FakeEngine, http: httpx.Client, limit: int, kept: list[int]) -> None:
    result = ask(http, prompt=[5, 6, 7], truncate_prompt_tokens=limit)
    assert engine.all(Submit)[0].prompt == kept
    assert result["usage"]["prompt_tokens"] == len(kept)


def test_special_tokens_around_a_text_are_optional(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    ask(http, prompt="hello", add_special_tokens=False)
    assert engine.all(Submit)[0].prompt == encode("hello")


def test_the_answer_bears_the_clients_id(engine: FakeEngine, http: httpx.Client) -> None:
    first, second = (ask(http, request_id="mine-1")["id"] for _ in range(2))
    assert first == second == "cmpl-mine-1"
    one, other = engine.all(Submit)
    assert one.request_id != other.request_id, "the engine's own are unique"


# ---------------------------------------------------------------- log-probabilities
def test_logprobs(engine: FakeEngine, openai_client: openai.OpenAI, encode: Encode) -> None:
    engine.script = scores(encode("hello"))
    result = openai_client.completions.create(model="tiny", prompt="x", logprobs=2).choices[0]
    pieces = [BACKEND.decode([token]) for token in encode("hello")]
    assert result.logprobs is not None
    assert result.logprobs.tokens == pieces
    assert result.logprobs.token_logprobs == [-0.5] * len(pieces)
    assert result.logprobs.top_logprobs == [{piece: -0.5, "<s>": -3.0} for piece in pieces]
    assert result.logprobs.text_offset == [len("".join(pieces[:i])) for i in range(len(pieces))]


def test_without_alternatives_there_is_the_token_itself(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = scores(encode("ab"))
    result = ask(http, logprobs=0)["choices"][0]["logprobs"]
    assert result["token_logprobs"] == [-0.5] * len(encode("ab"))
    assert result["top_logprobs"] == [{token: -0.5} for token in result["tokens"]]


def test_tokens_may_be_named_by_their_ids(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = scores(encode("ab"))
    names = [f"token_id:{token}" for token in encode("ab")]
    asked: dict[str, Any] = {"logprobs": 2, "return_tokens_as_token_ids": True}
    result = ask(http, **asked)["choices"][0]["logprobs"]
    assert result["tokens"] == names
    assert result["top_logprobs"] == [{name: -0.5, "token_id:0": -3.0} for name in names]
    echoed = ask(http, **asked, echo=True, prompt=[5, 6])["choices"][0]["logprobs"]
    assert echoed["tokens"] == ["token_id:5", "token_id:6", *names]


@pytest.mark.parametrize("text", ["hello world", "\u2603 and \U0001f600!"])
@pytest.mark.parametrize("stop", [None, "o w", "world"])
def test_a_stream_has_the_same_logprobs(
    engine: FakeEngine, http: httpx.Client, encode: Encode, text: str, stop: str | None
) -> None:
    engine.script = scores(encode(text))
    body: dict[str, Any] = {"logprobs": 1, "stop": stop, "echo": True, "prompt": "so: ", "return_token_ids": True}
    whole = ask(http, **body)["choices"][0]
    parts = [chunk["choices"][0] for chunk in streamed(http, **body)]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert list(chain.from_iterable(part["logprobs"][key] for part in parts)) == whole["logprobs"][key]
    assert list(chain.from_iterable(part["token_ids"] for part in parts)) == whole["token_ids"]
    assert (parts[-1]["finish_reason"], parts[-1].get("stop_reason")) == (
        whole["finish_reason"],
        whole.get("stop_reason"),
    )


def test_tokens_that_a_stop_string_removed_are_left_out(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = scores(encode("hello world"))
    choice = ask(http, logprobs=0, stop=" w")["choices"][0]
    assert choice["text"] == "hello"
    assert "".join(choice["logprobs"]["tokens"]) == "hello"
    assert choice["stop_reason"] == " w"


def test_half_a_character_is_written_as_bytes(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = scores(encode("\U0001f600"))
    result = ask(http, logprobs=0)["choices"][0]
    assert result["text"] == "\U0001f600"
    spelled = "".join(token.removeprefix("bytes:") for token in result["logprobs"]["tokens"])
    assert spelled == r"\xf0\x9f\x98\x80"


# ---------------------------------------------------------------- echo, and scores of prompts
def test_echo_with_logprobs_as_evaluations_ask_for_it(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    prompt = encode("hello world")
    engine.script = scores(encode("!"))
    asked: dict[str, Any] = {"prompt": [prompt, prompt[:3]], "temperature": 0, "max_tokens": 1, "logprobs": 1}
    result = ask(http, **asked, seed=1234, echo=True)
    for choice, ids in zip(result["choices"], (prompt, prompt[:3]), strict=True):
        assert choice["text"] == BACKEND.decode(ids) + "!"
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None, *(-float(i) for i in range(1, len(ids))), -0.5]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["text_offset"][0] == 0
        assert logprobs["text_offset"][-1] == len(choice["text"]) - 1
    assert [submit.sampling.prompt_logprobs for submit in engine.all(Submit)] == [1, 1]


@pytest.mark.parametrize(
    ("prompt", "offsets"),
    [("a</s>b", {"a": 0, "</s>": 1, "b": 5}), ("</s>a", {"</s>": 0, "a": 4}), ([EOS, 5], {"</s>": 0})],
)
def test_offsets_are_those_of_the_text(
    engine: FakeEngine, http: httpx.Client, encode: Encode, prompt: str | list[int], offsets: dict[str, int]
) -> None:
    """A special token has its length where the text spells it, and none elsewhere."""
    engine.script = scores(encode("!"))
    choice = ask(http, prompt=prompt, echo=True, logprobs=0)["choices"][0]
    result = dict(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))
    assert offsets.items() <= result.items()
    assert result["!"] == len(choice["text"]) - 1


def test_no_stop_string_before_the_least_tokens(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    tokens = encode("a b c d")
    engine.script = scores(tokens)
    assert ask(http, stop=" ", min_tokens=len(encode("a b")))["choices"][0]["text"] == "a b"
    assert ask(http, stop=" ", min_tokens=len(tokens))["choices"][0]["text"] == "a b c d"


def test_echo_alone_computes_nothing_more(engine: FakeEngine, http: httpx.Client) -> None:
    assert ask(http, prompt="so: ", echo=True, stop=":")["choices"][0]["text"] == "so: hello world"
    assert engine.all(Submit)[0].sampling.prompt_logprobs is None


def test_an_empty_text_among_prompts_is_the_token_that_begins_texts(
    engine: FakeEngine, http: httpx.Client, encode: Encode
) -> None:
    result = ask(http, prompt=["", "a"], echo=True)
    assert [submit.prompt for submit in engine.all(Submit)] == [[BOS], [BOS, *encode("a")]]
    assert [choice["text"] for choice in result["choices"]] == ["hello world", "ahello world"]
    refused = http.post("/v1/completions", json={"model": "tiny", "prompt": ["a", ""], "add_special_tokens": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_an_echo_of_ids_has_special_tokens_when_asked(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = scores(encode("hello"))
    ids = [BOS, *encode("so: "), EOS, *encode("then")]
    for skip, text in ((False, "<s>so: </s>thenhello"), (True, "so: thenhello")):
        asked: dict[str, Any] = {"prompt": ids, "echo": True, "skip_special_tokens": skip}
        result = ask(http, **asked, logprobs=0)["choices"][0]
        assert result["text"] == text
        places = dict(zip(result["logprobs"]["tokens"], result["logprobs"]["text_offset"], strict=True))
        assert text[places["</s>"] :].startswith("then" if skip else "</s>then")
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed(http, **asked)) == text


def test_a_prompt_alone(engine: FakeEngine, http: httpx.Client) -> None:
    engine.script = lambda submit: [
        [admitted(submit), PromptScores(submit.request_id, [score(token) for token in submit.prompt[1:]])],
        [Tokens(submit.request_id, [], "length")],
    ]
    result = ask(http, prompt="hello", echo=True, logprobs=1, max_tokens=0)
    assert result["choices"][0]["text"] == "hello"
    assert result["choices"][0]["finish_reason"] == "length"
    assert result["usage"]["completion_tokens"] == 0


def test_choices_share_the_scores_of_their_prompt(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    """Also where the others are faster than the first, whose prompt it is."""
    held: list[list[FromEngine]] = []

    def script(submit: Submit) -> list[list[FromEngine]]:
        frames = scores(encode("a"))(submit)
        if submit.sibling_of is None:
            held.extend(frames)
            return []
        return [*frames, *held]

    engine.script = script
    result = ask(http, prompt=[5, 6, 7], n=2, prompt_logprobs=1)
    for choice in result["choices"]:
        assert choice["prompt_logprobs"] == [
            None,
            {"6": {"logprob": -1.0, "rank": 1, "decoded_token": BACKEND.decode([6])}},
            {"7": {"logprob": -2.0, "rank": 1, "decoded_token": BACKEND.decode([7])}},
        ]
    assert [submit.sampling.prompt_logprobs for submit in engine.all(Submit)] == [1, None]


# ---------------------------------------------------------------- best_of, ids, ends
def test_the_likeliest_of_several(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    likely = {"0": -2.0, "1": -0.1, "2": -1.0}

    def script(submit: Submit) -> list[list[FromEngine]]:
        index = submit.request_id[-1]
        tokens = encode(index * (int(index) + 1))
        result = [score(token, logprob=likely[index]) for token in tokens]
        return [[admitted(submit), Tokens(submit.request_id, tokens, "length", result)]]

    engine.script = script
    result = ask(http, n=2, best_of=3)
    assert [(choice["index"], choice["text"]) for choice in result["choices"]] == [(0, "11"), (1, "222")]
    assert all(choice["logprobs"] is None for choice in result["choices"]), "the request wants none"
    assert result["usage"]["completion_tokens"] == sum(len(encode(str(i) * (i + 1))) for i in range(3))


def test_ids_of_prompt_and_output(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = generates([*encode("hello"), EOS], "stop")
    choice = ask(http, prompt="x", return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == [BOS, *encode("x")]
    assert choice["token_ids"] == [*encode("hello"), EOS]


def test_ids_that_were_not_asked_for_are_null(
    engine: FakeEngine, http: httpx.Client, openai_client: openai.OpenAI, encode: Encode
) -> None:
    """So clients of vLLM read them; chunks do not have them."""
    engine.script = generates(encode("hello"))
    choice: Any = openai_client.completions.create(model="tiny", prompt="x").choices[0]
    assert (choice.token_ids, choice.prompt_token_ids, choice.prompt_logprobs) == (None, None, None)
    absent = {"token_ids", "prompt_token_ids", "prompt_logprobs"}
    assert not any(absent & chunk["choices"][0].keys() for chunk in streamed(http))
    first, *others = (chunk["choices"][0] for chunk in streamed(http, return_token_ids=True))
    assert first["prompt_token_ids"]
    assert not any("prompt_token_ids" in part for part in others)


def test_a_stop_token_has_no_text_unless_wanted(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    (stop,) = encode("!")
    engine.script = generates([*encode("hello"), stop], "stop")
    for include, text in ((False, "hello"), (True, "hello!")):
        choice = ask(http, stop_token_ids=[stop], include_stop_str_in_output=include)["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", stop)


def test_the_stop_string_and_special_tokens_can_be_shown(
    engine: FakeEngine, http: httpx.Client, encode: Encode
) -> None:
    engine.script = generates([*encode("hello"), EOS, *encode(" world")])
    choice = ask(http, stop="wo", include_stop_str_in_output=True, skip_special_tokens=False)["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("hello</s> wo", "wo")
