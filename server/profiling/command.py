"""`kvmux profile`: measures steps of an engine in this process, and prints a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from rich.console import Console

from config.errors import SettingsError, convert_write_errors
from config.settings import Settings, load_settings
from server.cli.flags import pop_settings_file
from server.engine.build import Engine, build_engine
from server.engine.info import get_effective_settings
from server.models.files.directory import resolve_model_settings
from server.profiling.background_load import Neighbours, format_warning
from server.profiling.flags import ProfileOptions
from server.profiling.machine import measure_bandwidth, measure_matmul_flops
from server.profiling.report import MachineLimits, StepProfile, as_json, as_text
from server.profiling.steps import WARMUP_STEPS, Steps, measure_decode, measure_prefill

MAX_PREFILL_STEPS = 8
EXTRA_STEPS = 2 * WARMUP_STEPS  # steps that each sequence runs in addition to those that are measured


def run(options: dict[str, Any]) -> int:
    """Profile steps and print where their time goes.

    `options` are the flags given. Raises SettingsError for wrong settings or flags, or if the
    engine does not start.
    """
    if apart := [name for name in ("seconds", "trace") if name in options]:
        raise SettingsError(f"--{apart[0]}: for a running server only; give its --url")
    wanted = ProfileOptions(**{f.name: options.pop(f.name) for f in fields(ProfileOptions) if f.name in options})
    settings, neighbours = resolve_model_settings(load_settings(pop_settings_file(options), options)), Neighbours()
    if wanted.json:
        with convert_write_errors("--json", wanted.json):
            wanted.json.open("a").close()  # check before any slow work that the file is writable; keep an older report
    with Console(stderr=True).status("loading the model, and measuring its steps"):
        model, profiles = profile_steps(settings, wanted)
    busy = neighbours.compute_share()
    print(as_text(model, profiles, format_warning(busy)))
    if wanted.json:
        with convert_write_errors("--json", wanted.json):
            wanted.json.write_text(json.dumps(as_json(model, profiles, busy), indent=2) + "\n")
    return 0


def profile_steps(settings: Settings, wanted: ProfileOptions) -> tuple[dict[str, Any], list[StepProfile]]:
    """Return (settings of the engine, a profile of each kind of step, prefill last).

    Raises SettingsError if the engine does not start, or cannot run the steps that the options describe.
    """
    engine = build_engine(settings)
    check_options(engine, wanted)
    core = engine.core
    chunk = min(
        wanted.prefill or engine.max_seq_len, core.scheduler.limits.max_num_batched_tokens, engine.max_seq_len - 1
    )
    steps = [measure_decode(engine, wanted.kv_cache, n, wanted.context, wanted.steps) for n in wanted.sequences]
    steps.append(measure_prefill(engine, wanted.kv_cache, chunk, min(wanted.steps, MAX_PREFILL_STEPS)))
    limits = measure_limits(engine, steps)
    about = get_effective_settings(engine)
    described = {name: about[name] for name in ("model", "dtype", "weights", "kernels", "threads", "device")}
    return described | {"kv_cache": wanted.kv_cache}, [StepProfile(each, limits) for each in steps]


def measure_limits(engine: Engine, steps: Sequence[Steps]) -> MachineLimits:
    """Measure the limits of this machine: its memory bandwidth, and its speed in large matrix products.

    The bandwidth is measured for as many bytes as the largest decode step reads.
    """
    threads = torch.get_num_threads()
    size = max(sum(each.bytes.values()) for each in steps if each.sequences)
    return MachineLimits(
        measure_bandwidth(size, threads), measure_matmul_flops(engine.core.model.dtype, threads), threads
    )


def check_options(engine: Engine, wanted: ProfileOptions) -> None:
    """Raise SettingsError if the engine cannot run the steps that the options describe."""
    if wanted.kv_cache not in engine.core.instances:
        raise SettingsError(
            f"--kv-cache: no instance is named {wanted.kv_cache!r}; there are {', '.join(engine.core.instances)}"
        )
    if max(wanted.sequences) > engine.settings.max_num_seqs:
        raise SettingsError(f"--sequences: at most {engine.settings.max_num_seqs}; for more, raise --max-num-seqs")
    room = engine.max_seq_len - wanted.steps - EXTRA_STEPS - max(wanted.sequences)
    if wanted.context > room:
        raise SettingsError(f"--context: must be from 1 to {room}, to leave room for --steps")
