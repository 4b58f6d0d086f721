"""docs/guide/writing_a_strategy.md: its strategy and its policies work, installed by their entry points."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from cache_strategies import checkpoints, plugins
from cache_strategies.checkpoints.base import CheckpointUse, OpenedText
from cache_strategies.eviction import load_policy
from server.llm import LLM

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "writing_a_strategy.md"
STRATEGIES = {
    "mine": {"kind": "my_strategy"},
    "mru": {"kind": "paged", "eviction": "mru", "block_size": 8, "checkpoints": "doubling"},
}


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An LLM with instances of both plug-ins, which are installed as the page says."""
    for name, code in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        exec(compile(code, f"{name}.py", "exec"), vars(sys.modules[name]))
    points = [
        EntryPoint(name, value, group)
        for block in re.findall(r"```toml\n(\[project.*?)```", PAGE.read_text(), re.DOTALL)
        for group, named in tomllib.loads(block)["project"]["entry-points"].items()
        for name, value in named.items()
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: [p for p in points if p.group == group])
    return LLM("tiny", kv_memory="16MiB", max_seq_len=64, dtype="float32", strategies=STRATEGIES, check_integrity=True)


def test_plugins_of_the_document_write_what_the_built_in_strategies_write(llm: LLM) -> None:
    names = llm.engine.core.instances.keys() - {"sliding_window"}
    assert names > STRATEGIES.keys()
    for prompt in ("Once upon a time", "The dog"):
        texts = {name: llm.generate(prompt, max_tokens=40, temperature=0, kv_cache=name).text for name in names}
        assert len(set(texts.values())) == 1, texts


@pytest.mark.usefixtures("llm")
def test_the_policy_of_the_document_evicts_what_was_used_last() -> None:
    policy = load_policy("mru")()
    for key in "abc":
        policy.insert(key, 1, 0.0)
    policy.touch("b", 1.0)
    policy.discard("c")
    assert (policy.evict(), len(policy)) == ("a", 0)
    policy.insert("b", 1, 2.0)
    policy.insert("d", 1, 3.0)
    assert policy.evict() == "d"


@pytest.mark.usefixtures("llm")
def test_the_checkpoint_policy_of_the_document_keeps_fewer_and_fewer() -> None:
    policy = checkpoints.load_policy("doubling")(32)
    text = OpenedText(num_reusable=384, num_shared=0, message_ends=())
    assert {each for each in policy.place(text, 1, 400) if each < 400} == {32, 64, 128, 256, 384}
    near, far = (CheckpointUse(512, saved, 99, 0, is_inner=False, is_branch=False) for saved in (32, 256))
    assert policy.weigh(near) > policy.weigh(far)
