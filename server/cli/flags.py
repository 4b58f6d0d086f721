"""Settings as flags of the command line, in groups, made from the settings' own metadata. Imports nothing heavy.

Does not check values: values from all sources are checked alike, when the settings are loaded.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from config.settings import Settings
from config.sources import RENAMED, env_name, flag_name
from config.units import find_unit

GROUPS = {
    "model": (
        "model",
        "revision",
        "allow_symlinks",
        "model_name",
        "skip_model_name_validation",
        "tool_call_parser",
        "reasoning_parser",
        "default_chat_template_kwargs",
        "split_special_tokens",
        "model_impl",
        "device",
        "dtype",
        "weights",
        "weights_cache",
        "kernels",
        "threads",
        "metal_capture_steps",
    ),
    "HTTP": (
        "host",
        "port",
        "workers",
        "metrics_host",
        "metrics_port",
        "unknown_fields",
        "vllm_metric_names",
        "list_strategies",
        "enable_tokenizer_info_endpoint",
        "ui",
    ),
    "logs": ("log_level", "log_format", "log_prompts", "otlp_traces_endpoint"),
    "access": ("api_keys", "admin_token", "metrics_key", "cors_origins", "min_priority", "max_kv_cache_priority"),
    "limits": (
        "max_body_bytes",
        "max_inflight_body_bytes",
        "max_choices",
        "max_stop_strings",
        "max_prompt_characters",
        "text_timeout",
        "text_memory",
        "max_grammar_bytes",
        "grammar_timeout",
        "grammar_memory",
        "max_header_bytes",
        "header_timeout",
        "body_timeout",
        "keep_alive_timeout",
        "queue_timeout",
        "request_timeout",
        "drain_seconds",
        "strategy_timeout",
        "watchdog_timeout",
    ),
    "KV memory": ("kv_memory", "kv_memory_share", "kv_memory_at_start", "kv_overcommit"),
    "batching": (
        "max_seq_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_queued_requests",
        "priority_aging",
        "max_priority_wait",
        "deterministic",
    ),
    "speculation": ("num_speculative_tokens", "max_speculative_tokens"),
    "cache strategies": ("default_strategy", "rollouts_file", "check_integrity"),
}
METAVARS = {
    "model": "MODEL",
    "model_name": "NAME[,ALIAS]",
    "host": "ADDRESS",
    "api_keys": "KEY[,KEY]",
    "metrics_host": "ADDRESS",
    "admin_token": "TOKEN",
    "metrics_key": "KEY",
    "cors_origins": "ORIGIN[,ORIGIN]",
    "kv_memory": "SIZE",
    "text_memory": "SIZE",
    "grammar_memory": "SIZE",
    "weights_cache": "FOLDER",
    "rollouts_file": "FILE",
    "default_chat_template_kwargs": "JSON",
}


def add_settings(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[str]]) -> None:
    """Add the flag --config, and flags for the settings in `groups`: {title of a group: names of settings}."""
    parser.add_argument("--config", metavar="FILE", help="path of the settings file, in TOML [KVMUX_CONFIG]")
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add_flag(group, name, Settings.model_fields[name])
            for old in (old for old, new in RENAMED.items() if new == name):
                group.add_argument(flag_name(old), dest=old, help=argparse.SUPPRESS)


def group_settings() -> dict[str, list[str]]:
    """Return the names of the scalar settings by group; settings that GROUPS does not list are under "other"."""
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    title_of = {name: title for title, names in GROUPS.items() for name in names}
    for name, field in Settings.model_fields.items():
        if is_scalar(field.annotation):
            groups.setdefault(title_of.get(name, "other"), []).append(name)
    return groups


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    """Add the flag of one setting. Its value stays text, as load_settings() checks the values of all sources alike."""
    help_text = (field.description or "").replace("%", "%%")
    unit = find_unit(field)
    notes = [f"a {unit.name} such as {unit.examples}".replace("%", "%%")] if unit else []
    notes += [f"default: {field.default}"] if field.default is not None else []
    help_text += f" ({'; '.join(notes)})" if notes else ""
    help_text += f" [{env_name(name)}]"
    if field.annotation is bool:
        group.add_argument(flag_name(name), action=argparse.BooleanOptionalAction, help=help_text)
    else:
        group.add_argument(flag_name(name), dest=name, metavar=_metavar(name, field), help=help_text)


def is_scalar(annotation: Any) -> bool:
    """Return whether a setting of this type can be a flag: its values can be written as one argument."""
    if get_origin(annotation) is Annotated:
        return is_scalar(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return all(is_scalar(part) for part in get_args(annotation))
    scalars = (str, int, float, bool, list[str], dict[str, Any], type(None))  # an object is written as JSON
    return get_origin(annotation) is Literal or annotation in scalars


def _metavar(name: str, field: FieldInfo) -> str:
    annotation = field.annotation
    if unit := find_unit(field):
        return unit.name.upper()
    if get_origin(annotation) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(annotation)) + "}"
    parts = {annotation, *get_args(annotation)}
    return METAVARS.get(name) or ("N" if int in parts else "X" if float in parts else "NAME")
