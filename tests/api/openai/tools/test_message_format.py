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
