"""The servers that `python -m tools.bench peers` compares, and the commands that start them with the same settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from server.version import get_version
from tools.peers.installer import Installer
from tools.peers.llama_cpp import (
    INSTALLED_VERSION,
    LLAMA_CPP,
    LLAMA_CPP_VERSION,
    convert_model,
    find_program,
    install_llama_cpp,
)
from tools.peers.programs import ServerNeeds, ServerProgram, StartCommand
from tools.peers.vllm import VLLM, VLLM_VERSION, install_vllm

OURS = "kvmux"
KV_GIB = 2  # memory for keys and values of servers that have such a setting
PRE_TOKENIZER = "gpt-2"  # how the benchmark's tokenizer splits texts, in llama.cpp's words
TCMALLOC = "libtcmalloc_minimal.so.4"  # vLLM advises to load it before its own libraries
LIBRARY_FOLDERS = (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib"))


def prepare_kvmux(model: Path, kv_memory: str = f"{KV_GIB}GiB", more_flags: Sequence[str] = ()) -> ServerProgram:
    """Return kvmux's server with a model: a directory or a GGUF file."""

    def make_command(needs: ServerNeeds, port: int) -> StartCommand:
        flags = ["--model", str(model), "--kv-memory", kv_memory, "--max-seq-len", str(needs.tokens)]
        seats = ["--max-num-seqs", str(needs.streams), "--port", str(port), "--log-level", "warning"]
        return StartCommand([sys.executable, "-m", "server", "serve", *flags, *seats, *more_flags])

    return ServerProgram(OURS, f"kvmux {get_version()}", "/ready", make_command)


def prepare_llama_cpp(model: Path, installer: Installer) -> ServerProgram:
    """Return llama.cpp's server, installed if it is not there, with a GGUF file or a model that is converted to one.

    Raises InstallError.
    """
    installer.ensure(install_llama_cpp, INSTALLED_VERSION)
    file = convert_model(installer, model, "bf16", PRE_TOKENIZER) if model.is_dir() else model
    threads = str(os.cpu_count() or 1)

    def make_command(needs: ServerNeeds, port: int) -> StartCommand:
        program = str(find_program(installer.folder, "llama-server"))
        # Each stream has a share of the context: a common one (-kvu) would let each attend over the keys of all.
        size = ["-np", str(needs.streams), "-c", str(needs.streams * needs.tokens), "-t", threads, "-tb", threads]
        # Prompts come once each, so a store of earlier ones (up to 8 GiB) would only be filled.
        store = ["--cache-ram", "0", "--host", "127.0.0.1", "--port", str(port)]
        return StartCommand([program, "-m", str(file), *size, *store])

    version = f"llama.cpp of {LLAMA_CPP} {LLAMA_CPP_VERSION}"
    return ServerProgram("llama.cpp", version, "/health", make_command, start_for_each_workload=True)


def prepare_vllm(model: Path, installer: Installer) -> ServerProgram:
    """Return vLLM's server, installed if it is not there. Raises InstallError."""
    installer.ensure(install_vllm, VLLM_VERSION)
    venv = installer.folder / "venv"
    preloaded = [str(each) for each in (find_tcmalloc(), venv / "lib" / "libiomp5.so") if each and each.exists()]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "LD_PRELOAD": ":".join(preloaded),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    def make_command(needs: ServerNeeds, port: int) -> StartCommand:
        flags = ["--served-model-name", "m", "--dtype", "bfloat16", "--max-model-len", str(needs.tokens)]
        seats = ["--max-num-seqs", str(needs.streams), "--host", "127.0.0.1", "--port", str(port)]
        return StartCommand([str(venv / "bin" / "vllm"), "serve", str(model), *flags, *seats], environment)

    return ServerProgram("vLLM", f"{VLLM} {VLLM_VERSION}", "/health", make_command)


def find_tcmalloc() -> Path | None:
    """Return the path of tcmalloc if the machine has it."""
    found = (file for folder in LIBRARY_FOLDERS for file in folder.glob(f"**/{TCMALLOC}"))
    return next(found, None)
