"""Prints, as JSON, the tokens at which llama.cpp ends a text, for each GGUF file among the arguments.

A program of its own, as llama.cpp writes a long log and aborts the process where an assertion of its own fails.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def find_ends(files: Sequence[Path]) -> list[set[int]]:
    """Return the ids of the tokens at which llama.cpp ends a text, for each file."""
    command = [sys.executable, "-m", __name__, *map(str, files)]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:].decode(errors="replace")
    return [set(ends) for ends in json.loads(done.stdout)]


class _ModelParams(ctypes.Structure):
    """llama.cpp's llama_model_params, whose members this program need not know; it is smaller than this."""

    _fields_ = (("members", ctypes.c_uint64 * 64),)


def _print_ends(files: Sequence[str]) -> None:
    import xllamacpp.xllamacpp as library

    llama = ctypes.CDLL(library.__file__)
    llama.llama_model_default_params.restype = _ModelParams
    llama.llama_model_load_from_file.argtypes = (ctypes.c_char_p, _ModelParams)
    llama.llama_model_load_from_file.restype = ctypes.c_void_p
    llama.llama_model_get_vocab.argtypes = llama.llama_model_free.argtypes = (ctypes.c_void_p,)
    llama.llama_model_get_vocab.restype = ctypes.c_void_p
    llama.llama_vocab_n_tokens.argtypes = (ctypes.c_void_p,)
    llama.llama_vocab_is_eog.argtypes = (ctypes.c_void_p, ctypes.c_int32)
    llama.llama_vocab_is_eog.restype = ctypes.c_bool
    llama.llama_backend_init()
    found = []
    for file in files:
        model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
        assert model, f"llama.cpp cannot load {file}"
        vocabulary = llama.llama_model_get_vocab(model)
        tokens = range(llama.llama_vocab_n_tokens(vocabulary))
        found.append([token for token in tokens if llama.llama_vocab_is_eog(vocabulary, token)])
        llama.llama_model_free(model)
    print(json.dumps(found))


if __name__ == "__main__":
    _print_ends(sys.argv[1:])
