"""Computes how far llama.cpp's predictions with some cache types are from those with keys and values in float16.

Arguments: the folder of llama-cpp-python's source, the folder of the built libraries, the GGUF file, the number of
threads, a JSON file with token ids, the number of last tokens that count, and cache types. A cache type is that of keys
and that of values, such as q8_0/q4_0, and may end with /plain (without llama.cpp's rotation) or /slow (without flash
attention). Prints a line of JSON for each type.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
BASE = "f16/f16"
BATCH = 512  # tokens of a step
Logits = npt.NDArray[np.float32]


def main() -> None:
    source, libraries, file, threads, ids_file, last, *cache_types = sys.argv[1:]
    llama = import_bindings(Path(source), Path(libraries))
    ids = json.loads(Path(ids_file).read_text())
    silence = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(silence, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
    base = compute_logits(llama, model, ids, int(last), BASE, int(threads))
    for cache_type in cache_types:
        logits = compute_logits(llama, model, ids, int(last), cache_type, int(threads))
        print(json.dumps({"cache_type": cache_type} | compare(base, logits)), flush=True)


def import_bindings(source: Path, libraries: Path) -> Any:
    """Return the module of llama.cpp's C functions, without the package around it, which needs more packages."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(libraries)
    package = ModuleType("llama_cpp")
    package.__path__ = [str(source / "llama_cpp")]
    sys.modules[package.__name__] = package
    return import_module("llama_cpp.llama_cpp")


def compute_logits(llama: Any, model: Any, ids: Sequence[int], last: int, cache_type: str, threads: int) -> Logits:
    """Return the logits [last, V] of the last tokens; keys and values of all tokens are in a cache of the type."""
    key, value, *how = cache_type.split("/")
    os.environ["LLAMA_ATTN_ROT_DISABLE"] = "1" if "plain" in how else "0"
    params = llama.llama_context_default_params()
    params.n_ctx = -(-len(ids) // 256) * 256
    params.n_batch = params.n_ubatch = params.n_outputs_max = BATCH
    params.n_threads = params.n_threads_batch = threads
    params.type_k, params.type_v = GGML_TYPES[key], GGML_TYPES[value]
    params.flash_attn_type, params.swa_full = int("slow" not in how), True  # quantized values need flash attention
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp has no cache of type {cache_type} for this model")
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch, rows = llama.llama_batch_init(BATCH, 0, 1), []
    for first in range(0, len(ids), BATCH):
        places = range(first, min(first + BATCH, len(ids)))
        counted = [i for i, place in enumerate(places) if place >= len(ids) - last]
        batch.n_tokens = len(places)
        for i, place in enumerate(places):
            batch.token[i], batch.pos[i], batch.logits[i] = ids[place], place, i in counted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if llama.llama_decode(context, batch):
            raise SystemExit(f"llama.cpp failed with a cache of type {cache_type}")
        pointers = (llama.llama_get_logits_ith(context, i) for i in counted)
        rows += [np.ctypeslib.as_array(each, (vocabulary,)).copy() for each in pointers]
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    return np.stack(rows)


def compare(base: Logits, logits: Logits) -> dict[str, float]:
    """Return the figures of KL(base || logits), in nats, over the tokens."""
    kl = np.array([_compute_kl(*map(_log_softmax, each)) for each in zip(base, logits, strict=True)])
    return {
        "kl_nats": float(kl.mean()),
        "kl_median": float(np.median(kl)),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "top1_agreement": float((base.argmax(-1) == logits.argmax(-1)).mean()),
    }


def _compute_kl(expected: npt.NDArray[np.float64], found: npt.NDArray[np.float64]) -> float:
    return float((np.exp(expected) * (expected - found)).sum())


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    normalized: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normalized


if __name__ == "__main__":
    main()
