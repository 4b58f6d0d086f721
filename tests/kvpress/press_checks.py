"""Tests of kvpress's own presses as scorers; tests/kvpress/run.py runs them in the environment that has kvpress."""

from __future__ import annotations

import importlib
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from cache_strategies.compressed.options import CompressedOptions, make_scorer
from cache_strategies.scorers import load_scorer
from cache_strategies.scorers.kvpress import READS
from config.errors import SettingsError
from kernels.reference.backend import ReferenceOps
from plugin_kit.scorers.promises import PROMISES
from plugin_kit.scorers.trial import LAYERS, ScorerTrial
from server.llm import LLM
from tests.end_to_end.server_process import serving

with warnings.catch_warnings():  # of what kvpress imports
    warnings.simplefilter("ignore")
    importlib.import_module("kvpress")

SMALL: dict[str, dict[str, Any]] = {  # options with which few tokens between boundaries are enough
    "CapPress": {"n_future_positions": 16},
    "CompactorPress": {"sink_size_start": 3, "chunk_size": 8},
    "ExpectedAttentionPress": {"n_future_positions": 16},
    "LagKVPress": {"lag_size": 8},
    "NonCausalAttnPress": {"chunk_size": 8},
    "SnapKVPress": {"window_size": 8},
}
REFUSED = {  # of kvpress 0.5.5
    "QFilter": "it loads weights",
    "KVzap": "it loads weights",
    "ExpectedAttentionStats": "it loads weights or statistics",
    "PyramidKV": "it also decides how many keys stay",
    "CriticalKV": r"it is made of other objects \(press\)",
    "AdaKV": "it is made of other objects",
    "KVzip": "it is not a ScorerPress",
    "FastKVzip": "it is not a ScorerPress",
}
PROMPT = "Once upon a time there was a little dog. " * 12
NUM_PROMISES = 8  # of each press
every_press = pytest.mark.parametrize("name", sorted(READS))


@every_press
def test_a_press_keeps_the_promises_of_scorers(name: str, rng: random.Random) -> None:
    """Some of them, drawn anew; those of `score` alone if it can score keys and values of different sizes."""
    cls = load_scorer(f"kvpress:{name}")
    trial = ScorerTrial(f"kvpress:{name}", cls, SMALL.get(name, {}), ReferenceOps(), rng)
    is_usable = any(trial.iter_layers(trial.make_scorer()))
    promises = [each for each in PROMISES if is_usable or each.name.startswith("under compressed")]
    for promise in rng.sample(promises, NUM_PROMISES):
        print(promise.name)
        if promise.is_made(trial):
            promise(trial)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_other_presses_are_refused_with_the_reason(name: str) -> None:
    usable = ", ".join(sorted(each.removesuffix("Press") for each in READS))
    with pytest.raises(SettingsError, match=f"{REFUSED[name]}.*; those that can be used are {usable}$"):
        load_scorer(f"kvpress:{name}")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("SnapKV", {"window": 8}, "the options of scorer 'kvpress:SnapKV' are: kernel_size, window_size"),
        ("SnapKV", {"kernel_size": 4}, "fails to score 512 keys of this model with these scorer_options"),
        ("CUR", {"leverage_type": "both"}, "leverage_type: should be 'key', 'value', 'kv_avg' or 'kv_product'"),
        ("LagKV", {"lag_size": 0}, "fails to score 512 keys"),
        ("NonCausalAttn", {"chunk_size": 0}, "chunk_size must be positive"),
    ],
)
def test_wrong_options_are_refused_at_the_start(name: str, options: dict[str, Any], message: str) -> None:
    wanted = CompressedOptions(scorer=f"kvpress:{name}", scorer_options=options)
    with pytest.raises(SettingsError, match=message):
        make_scorer("mine", wanted, LAYERS)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Return the embedded model with an instance for each press."""
    presses = {name.lower(): {"kind": "compressed", "scorer": f"kvpress:{name}", "budget": 0.5} for name in READS}
    return LLM("tiny", kv_memory="256MiB", dtype="float32", strategies={"paged": {"kind": "paged"}} | presses)


@every_press
def test_texts_go_on_under_every_press(name: str, llm: LLM) -> None:
    """Past boundaries in the prompt and in the generated text."""
    completion = llm.generate(PROMPT, max_tokens=400, kv_cache=name.lower(), temperature=0, ignore_eos=True)
    assert (len(completion.token_ids), completion.finish_reason) == (400, "length")


def test_a_server_answers_with_presses(tmp_path: Path) -> None:
    file = tmp_path / "kvmux.toml"
    file.write_text(
        """
        default_strategy = "paged"
        strategies.paged = {}
        strategies.snap = {kind = "compressed", scorer = "kvpress:SnapKV", budget = 0.25}
        strategies.ahead = {kind = "compressed", scorer = "kvpress:expected_attention", budget = 0.25}
        """
    )
    flags = ("--dtype", "float32", "--threads", "1", "--kv-memory", "128MiB", "--config", str(file))
    with serving(*flags, anew=True) as server:
        peaks = {}
        for name in ("paged", "snap", "ahead"):
            answer = server.complete(prompt=5 * PROMPT, max_tokens=300, kv_cache=name, explain=True, ignore_eos=True)
            assert answer.status_code == 200, answer.text
            [choice] = answer.json()["choices"]
            peaks[name] = choice["kv_cache"]["peak_kv_bytes"]
            assert (choice["kv_cache"]["compactions"] > 0) == (name != "paged")
        assert max(peaks["snap"], peaks["ahead"]) < 0.8 * peaks["paged"]
