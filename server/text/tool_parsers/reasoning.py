"""The families of models by how they mark their reasoning: one row for each, named as vLLM's --reasoning-parser.

A family is known by texts in its chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

KIMI_K3_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
# Around the content of Kimi K3's messages
KIMI_K3_CONTENT = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

# What begins and ends reasoning in gpt-oss's format, and how a message goes on with its content after it
HARMONY_REASONING, HARMONY_ENDS = ("<|channel|>analysis<|message|>",), ("<|end|>",)
HARMONY_CONTENT = "<|end|><|start|>assistant<|channel|>final<|message|>"


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts between which a family writes its reasoning, before the answer."""

    name: str
    opening: tuple[str, ...]
    closing: tuple[str, ...]
    in_template: tuple[str, ...] = ()  # its chat templates have one of these texts; none: only a setting names it
    assume_open: bool = False  # whether the message begins with reasoning though neither it nor the prompt says so
    harmony: bool = False  # whether it is a part of gpt-oss's format, which `harmony.py` reads
    within: tuple[str, ...] = ()  # special tokens that are a part of those texts
    around: tuple[str, ...] = ()  # texts around the content, and no part of it
    aliases: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Return all markers; those that are special tokens must be in the text that is read."""
        return HARMONY_MARKERS if self.harmony else (*self.opening, *self.closing, *self.within)

    @property
    def openings(self) -> tuple[str, ...]:
        """Return the texts that begin reasoning, also in the middle of a message."""
        return HARMONY_REASONING if self.harmony else self.opening

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the texts that end reasoning."""
        return HARMONY_ENDS if self.harmony else self.closing

    @property
    def closing_text(self) -> str:
        """Return the text after which a message that reasons goes on with its content."""
        return HARMONY_CONTENT if self.harmony else self.closing[0]

    def is_open(self, prompt: str) -> bool:
        """Return whether a message that follows the prompt begins within the reasoning."""
        opened = max((prompt.rfind(marker) for marker in self.opening), default=-1)
        closed = max((prompt.rfind(marker) for marker in self.closing), default=-1)
        end = prompt.rstrip()
        if opened > closed and end.endswith(self.opening):
            return True
        return self.assume_open and not end.endswith(self.closing)


REASONING_FORMATS = (  # the first with a text that is in a chat template is that template's
    ReasoningFormat("openai_gptoss", (), (), ("<|channel|>",), harmony=True, aliases=("gpt_oss",)),
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), ("[THINK]",)),
    ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",), ("<seed:think>", "seed:think")),
    ReasoningFormat("gemma4", ("<|channel>thought",), ("<channel|>",), ("<|channel>",), within=("<|channel>",)),
    ReasoningFormat("apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",), ("<|inner_prefix|>",)),
    ReasoningFormat("minimax_m3", ("<mm:think>",), ("</mm:think>",), ("<mm:think>", "mm:think")),
    ReasoningFormat(
        "kimi_k3",
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        ("<|open|>",),
        within=KIMI_K3_TOKENS,
        around=KIMI_K3_CONTENT,
    ),
    ReasoningFormat("cohere", ("<|START_THINKING|>",), ("<|END_THINKING|>",), ("<|START_THINKING|>",)),
    ReasoningFormat(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        ("Here is my thought process:", "Here's my thought process:"),
    ),
    ReasoningFormat(
        "qwen3",
        ("<think>",),
        ("</think>",),
        ("<think>", "</think>"),
        aliases=(
            "think",
            "glm45",
            "granite33",
            "deepseek_v3",
            "kimi_k2",
            "minimax_m2",
            "nemotron_v3",
            "olmo3",
            "step3p5",
        ),
    ),
    ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",), assume_open=True),
)


@cache
def list_reasoning_formats() -> Mapping[str, ReasoningFormat]:
    """Return the rows by name, and by their other names."""
    return {name: row for row in REASONING_FORMATS for name in (row.name, *row.aliases)}


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the row of a chat template, given as source text; None if it shows no known way to mark reasoning."""
    return next((row for row in REASONING_FORMATS if any(text in template for text in row.in_template)), None)
