"""An engine with a small random model, whose logits transformers computes too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from config.settings import load_settings
from server.engine.build import Engine, build_engine
from tests.models import random_models

STRATEGIES = {
    "narrow": {"kind": "sliding_window", "window": 24, "sinks": 0},
    "sinks": {"kind": "sliding_window", "window": 24, "sinks": 4, "max_row": 5},
}


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    random_models.save_random_model("llama", directory)
    return directory


@pytest.fixture(scope="session")
def reference(model_directory: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    return model


@pytest.fixture(scope="session")
def engine(model_directory: Path) -> Engine:
    flags = {"model": str(model_directory), "dtype": "float32", "max_num_seqs": 5, "max_seq_len": 160, "threads": 1}
    return build_engine(load_settings(None, flags | {"strategies": STRATEGIES}))
