"""How a model writes calls and reasoning, by its chat template or by settings, and reasoning in answers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from config.errors import SettingsError
from server.engine.ipc.messages import Submit
from tests.api.openai.tools.conftest import ToolServer, serving_tools
from tests.api.openai.tools.tool_chats import (
    CALL,
    MESSAGES,
    TOOL,
    ask,
)
from tests.api.payloads import chunks_of, error_of


def test_models_without_tools() -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with serving_tools(plain) as server:
        refused = server.chat(tools=[TOOL])
        assert (refused.status_code, error_of(refused)["code"]) == (400, "tools_not_supported")
        assert "tool_call_parser" in error_of(refused)["message"]
        assert "no place for tools" in error_of(server.chat(tools=[TOOL], tool_choice="none"))["message"]
        assert "no place for documents" in error_of(server.chat(documents=[{"text": "a"}]))["message"]
    with serving_tools(plain + "{{ tools }}", tool_call_parser="hermes") as server:
        server.says(CALL)
        assert ask(server).choices[0].message.tool_calls


def test_settings() -> None:
    with serving_tools("qwen3", tool_call_parser="off", reasoning_parser="off") as server:
        assert server.chat(tools=[TOOL]).status_code == 400
        server.says("<think>Hm.</think>Yes.")
        (choice,) = server.client.chat.completions.create(model="tiny", messages=MESSAGES).choices
        assert choice.message.content == "<think>Hm.</think>Yes."
    with serving_tools("qwen3", reasoning_parser="deepseek_r1") as server:
        server.says("Hm.</think>Yes.")
        (choice,) = server.client.chat.completions.create(model="tiny", messages=MESSAGES).choices
        message: Any = choice.message
        assert (message.reasoning, message.content) == ("Hm.", "Yes.")


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_ends_the_start(setting: str) -> None:
    with (
        pytest.raises(SettingsError, match=f"{setting}: 'hermas' is not one of auto, off"),
        serving_tools("qwen3", **{setting: "hermas"}),
    ):
        pass


# ---------------------------------------------------------------- reasoning
def test_reasoning(qwen: ToolServer) -> None:
    qwen.says("<think>\nHm.\n</think>\n\nYes.")
    (choice,) = ask(qwen, tools=openai.NOT_GIVEN).choices
    assert (choice.message.reasoning, choice.message.reasoning_content) == ("Hm.", "Hm.")
    assert choice.message.content == "Yes."
    (choice,) = ask(qwen, extra_body={"include_reasoning": False}).choices
    assert not hasattr(choice.message, "reasoning")
    assert choice.message.content == "Yes."
    chunks = chunks_of(qwen.chat(stream=True, include_reasoning=False))
    assert all("reasoning" not in chunk["choices"][0]["delta"] for chunk in chunks)


def test_thinking_can_be_switched_off(qwen: ToolServer) -> None:
    qwen.says("Yes.")
    (choice,) = ask(qwen, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices
    assert choice.message.content == "Yes."
    assert not hasattr(choice.message, "reasoning")
    assert qwen.decode(qwen.engine.all(Submit)[0].prompt).endswith("<think>\n\n</think>\n\n")


def test_reasoning_that_the_prompt_begins() -> None:
    with serving_tools("deepseek_r1_distill") as server:
        server.says("Hm.\n</think>\n\nYes.")
        (choice,) = server.client.chat.completions.create(model="tiny", messages=MESSAGES).choices
        message: Any = choice.message
        assert (message.reasoning, message.content) == ("Hm.", "Yes.")


# ---------------------------------------------------------------- how many tokens were reasoning
def count_tokens_between(server: ToolServer, text: str, opening: str, closing: str) -> int:
    """Count the tokens that begin after one text and before another one, or the end; each character is a byte here."""
    start = text.index(opening) + len(opening)
    end = text.find(closing, start) if closing in text[start:] else len(text)
    begins, length = [], 0
    for token in server.encode(text):
        begins.append(length)
        length += len(server.decode([token]))
    return sum(start <= at < end for at in begins)


@pytest.mark.parametrize(
    ("template", "opening", "closing", "text"),
    [
        ("qwen3", "<think>", "</think>", "<think>\nHm, hello <tool> world.\n</think>\n\nYes."),
        ("qwen3", "<think>", "</think>", "<think>never </ends"),
        ("deepseek_r1_distill", "", "</think>", "Hm.\n</think>\n\nYes."),
        ("gpt_oss", "<|message|>", "<|end|>", "<|channel|>analysis<|message|>Hm hello.<|end|>"
         "<|start|>assistant<|channel|>final<|message|>Yes."),
    ],
)  # fmt: skip
def test_tokens_of_the_reasoning_are_counted(template: str, opening: str, closing: str, text: str) -> None:
    with serving_tools(template) as server:
        server.says(text, "length")
        expected = count_tokens_between(server, text, opening, closing)
        assert expected > 0
        for fields in ({}, {"include_reasoning": False}):
            usage = server.chat(**fields).json()["usage"]
            assert usage["completion_tokens_details"] == {"reasoning_tokens": expected}
        several = server.chat(n=3).json()["usage"]
        assert several["completion_tokens_details"]["reasoning_tokens"] == 3 * expected
        chunks = chunks_of(
            server.chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
        )
        counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == expected


def test_without_reasoning_no_token_is_counted(qwen: ToolServer) -> None:
    qwen.says("Yes.")
    assert qwen.chat().json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    with serving_tools("qwen3", reasoning_parser="off") as server:
        server.says("<think>Hm.</think>Yes.")
        assert "completion_tokens_details" not in server.chat().json()["usage"]


# ---------------------------------------------------------------- a budget of reasoning
def test_the_budget_reaches_the_engine_in_the_models_tokens() -> None:
    with serving_tools("qwen3", ["<think>", "</think>"]) as server:
        server.says("<think>Hm.</think>Yes.")
        assert server.chat(thinking_token_budget=5).status_code == 200
        assert server.chat(thinking_token_budget=0, chat_template_kwargs={"enable_thinking": False}).status_code == 200
        first, second = (submit.sampling.thinking for submit in server.engine.all(Submit))
        assert first is not None
        (opening,), (end,) = server.encode("<think>"), server.encode("</think>")
        assert (first.num_tokens, first.is_open, first.closing) == (5, False, (end,))
        assert (first.openings, first.ends) == (((opening,),), ((end,),))
        assert second is not None
        assert second.num_tokens == 0
        server.chat()
        assert server.engine.all(Submit)[-1].sampling.thinking is None


def test_the_budget_of_gpt_oss() -> None:
    with serving_tools("gpt_oss") as server:
        server.says("<|channel|>final<|message|>Yes.")
        assert server.chat(thinking_token_budget=5).status_code == 200
        thinking = server.engine.all(Submit)[-1].sampling.thinking
        assert thinking is not None
        assert server.decode(thinking.closing) == "<|end|><|start|>assistant<|channel|>final<|message|>"
        assert [*map(server.decode, thinking.openings)] == ["<|channel|>analysis<|message|>"]


def test_a_budget_and_a_required_call_exclude_each_other_in_gpt_oss() -> None:
    with serving_tools("gpt_oss") as server:
        response = server.chat(thinking_token_budget=5, tools=[TOOL], tool_choice="required")
        assert "required tool call" in error_of(response)["message"]
        server.says("<|channel|>final<|message|>Yes.")
        assert server.chat(thinking_token_budget=5, tools=[TOOL]).status_code == 200


def test_a_continued_answer_has_no_reasoning_to_end() -> None:
    with serving_tools("deepseek_r1_distill", ["<think>", "</think>"], reasoning_parser="deepseek_r1") as server:
        server.says("more")
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
        body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
        assert server.chat(thinking_token_budget=5, **body).status_code == 200
        server.chat(thinking_token_budget=5)
        continued, new = (submit.sampling.thinking for submit in server.engine.all(Submit))
        assert continued is not None
        assert new is not None
        assert (continued.is_open, new.is_open) == (False, True)


@pytest.mark.parametrize(
    ("template", "budget", "words"),
    [
        ("qwen3", 5, "markers of reasoning are several tokens each"),
        ("qwen3", -1, "0 or more"),
        ("qwen3", "x", "a whole number"),
        ("qwen25", 5, "no known way to mark reasoning"),
    ],
)
def test_budgets_that_are_refused(template: str, budget: Any, words: str) -> None:
    with serving_tools(template) as server:
        response = server.chat(thinking_token_budget=budget)
        assert (response.status_code, error_of(response)["param"]) == (400, "thinking_token_budget")
        assert words in error_of(response)["message"]
