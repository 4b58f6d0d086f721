"""Malformed models are refused in a sentence, or computed: never a crash, another exception, or gigabytes of memory.

Two thousand files, others in each run, each spoilt in one field, loaded by the calls of the engine and the workers.
They are tried in processes of their own; which of them, and what is random in them, follows from a seed that is
printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from gguf import GGMLQuantizationType as Type

from tests.models.gguf_files import gguf_model, write_gguf
from tests.models.mlx_files import write_mlx
from tests.models.random_models import CONFIGS, random_model, save_random_model

MOST_MEMORY = 1 << 30  # bytes; what transformers itself takes is a third of it
SECONDS = 280

BATCHES = {  # kind, number of cases drawn, model
    "config": [
        ("config", 250, "llama"),
        *(("config", 50, name) for name in ("gemma3", "qwen3_moe", "phi3_longrope", "llama_yarn", "llama3", "mixtral")),
    ],
    "files": [("safetensors", 180, "llama"), ("tokenizer", 250, "llama"), ("header", 40, "mlx")],
    "tensors": [("tensors", 80, name) for name in ("gemma3", "llama_tied_biased", "qwen3_moe", "phi3", "mlx")],
    "MLX": [("config", 120, "mlx"), ("tensors", 120, "mlx")],
    "GGUF": [("gguf", 400, "llama3.gguf"), ("gguf", 160, "gemma3.gguf")],
    "transformers": [("transformers", 60, "olmo2"), ("transformers", 60, "gpt2"), ("shapes", 40, "olmo2")],
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a valid model of every kind."""
    folder = tmp_path_factory.mktemp("sources")
    for name in {name for batch in BATCHES.values() for *_, name in batch}:
        if name.endswith(".gguf"):
            kind = Type.Q8_0 if name == "gemma3.gguf" else Type.F32
            write_gguf(gguf_model(name.removesuffix(".gguf")), folder / name, kind)
        else:
            make_directory(folder, name)
    return folder


def make_directory(folder: Path, name: str) -> Path:
    """A valid model with all the files that a directory may have."""
    directory = folder / name
    if name == "mlx":
        write_mlx(random_model(CONFIGS["llama_tied_biased"]), directory, 4, 32)
    else:
        save_random_model(name, directory)
    added = {"0": {"content": "<s>", "special": True}}
    words = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "additional_special_tokens": ["<s>"]}
    tokens = words | {"added_tokens_decoder": added, "chat_template": "{{ messages }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens))
    (directory / "special_tokens_map.json").write_text(json.dumps(words))
    return directory


@pytest.mark.parametrize("name", BATCHES)
def test_a_malformed_model_is_refused_in_a_sentence_or_computed(name: str, sources: Path, tmp_path: Path) -> None:
    seed = str(Random().getrandbits(32))
    batches = [f"{kind}:{most}:{sources / model}" for kind, most, model in BATCHES[name]]
    command = [sys.executable, "-m", "tests.models.run_malformed_models", seed, str(tmp_path), *batches]
    print("again:", *command)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    cases = [line["case"] for line in told if "case" in line]
    faults = [line["fault"] for line in told if "fault" in line]
    found = [f"{case}: {fault}" for case, fault in zip(cases, faults, strict=False) if fault is not None]
    assert not found, "\n".join(found)
    assert ran.returncode == 0, f"it died of {cases[-1] if cases else 'the first model'}: {ran.stderr[-2000:]}"
    assert len(cases) >= 150
    assert told[-1]["took"] < MOST_MEMORY
