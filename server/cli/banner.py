"""The text that a terminal shows when the server is ready, made from the settings and the engine's summary."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from config.settings import Settings
from server.models.files.directory import EMBEDDED
from server.text.chat.template import has_chat_template
from server.version import get_version


def format_banner(url: str, settings: Settings, ready: Mapping[str, Any]) -> str:
    """Return the text to print once the server is ready: address, model, strategies and a first request to try."""
    path, body = _make_first_request(settings)
    shown = shlex.quote(json.dumps({"model": ready["model"], **body, "max_tokens": 64}))
    kv_memory = ByteSize(ready["kv_memory_bytes"]).human_readable(separator=" ")
    everywhere = " (on every address of this machine)" if settings.host in ("0.0.0.0", "::") else ""
    return f"""
kvmux {get_version()} serves {ready["model"]} on {url}{everywhere}

  model       {ready["dtype"]} on {ready["device"]}; prompt and completion up to {ready["max_seq_len"]:,} tokens
  weights     {_format_weights(ready["weight_formats"])}
  kernels     {ready["kernels"]}
{_format_states(ready["state_bytes"], ready["kv_memory_bytes"], settings.max_num_seqs)}\
  KV memory   {kv_memory}, shared by these strategies; each alone has room for
{_format_strategies(ready["strategies"], settings.default_strategy)}

Try it:

  curl {url}{path} -H 'Content-Type: application/json' \\
    -d {shown}
{_format_page(url, settings)}"""


def _format_weights(formats: Mapping[str, Mapping[str, int]]) -> str:
    """Return the formats, each with at least a hundredth of the bytes, the bytes of all and the bits of a parameter."""
    size = sum(usage["nbytes"] for usage in formats.values())
    bits = 8 * size / sum(usage["parameters"] for usage in formats.values())
    shown = ", ".join(name for name, usage in formats.items() if 100 * usage["nbytes"] >= size)
    return f"{shown}; {ByteSize(size).human_readable(separator=' ')}, {bits:.1f} bits a parameter"


def _format_states(state_bytes: int, kv_memory_bytes: int, max_num_seqs: int) -> str:
    """Return the line about the recurrent states of a text; empty for a model without any.

    It warns if the memory has room for few besides those of running texts, two each.
    """
    if not state_bytes:
        return ""
    room, running = kv_memory_bytes // state_bytes, 2 * max_num_seqs
    size = ByteSize(state_bytes).human_readable(separator=" ")
    few = "" if room >= 2 * running else "; few checkpoints find room: raise --kv-memory or lower --max-num-seqs"
    return f"  states      {size} each, two of a running text; the KV memory has room for {room:,}{few}\n"


def _make_first_request(settings: Settings) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a first request: a chat if the model has a chat template.

    The embedded model has one as well, but it was trained to continue stories.
    """
    directory = Path(settings.model)
    if directory not in EMBEDDED.values() and has_chat_template(directory):
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me a joke."}]}
    return "/v1/completions", {"prompt": "Once upon a time"}


def _format_page(url: str, settings: Settings) -> str:
    """Return the lines about the page, empty if it is switched off."""
    if not settings.ui:
        return ""
    access = "with the admin_token" if settings.admin_token else "on this machine only, without an admin_token"
    return f"""
Watch it ({access}):

  {url}/ui
"""


def _format_strategies(strategies: Sequence[Mapping[str, Any]], default: str) -> str:
    """Return a line for each strategy: its name, how many tokens it has room for, its kind, and options given."""
    width = max(len(each["name"]) for each in strategies)
    lines = []
    for each in strategies:
        notes = ["default"] if each["name"] == default else []
        notes += [each["kind"]] if each["kind"] != each["name"] else []
        notes += [f"{key}={value}" for key, value in each["options"].items() if value is not None]
        tokens = each["capacity_tokens"]
        room = "any number of" if tokens is None else f"{tokens:,}"
        line = f"{each['name']:{width}}  {room:>13} tokens  {', '.join(notes)}"
        lines.append(" " * 14 + line.rstrip())
    return "\n".join(lines)
