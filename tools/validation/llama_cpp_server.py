"""Runs llama.cpp's HTTP server, as the package xllamacpp has it, until SIGTERM.

Arguments: the GGUF file, the port, threads, slots (requests at a time), tokens of a slot, and the type of keys and
values.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp

CACHE_TYPES = {"f32": xllamacpp.ggml_type.GGML_TYPE_F32, "q8_0": xllamacpp.ggml_type.GGML_TYPE_Q8_0}
FLASH_ATTENTION = xllamacpp.llama_flash_attn_type


def main() -> None:
    file, port, threads, slots, tokens, cache_type = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.n_parallel, params.n_ctx = int(slots), int(slots) * int(tokens)
    params.cache_type_k = params.cache_type_v = CACHE_TYPES[cache_type]
    # quantized values need flash attention, which rounds its products to float16; float32 is exact without it
    exact = cache_type == "f32"
    params.flash_attn_type = (
        FLASH_ATTENTION.LLAMA_FLASH_ATTN_TYPE_DISABLED if exact else FLASH_ATTENTION.LLAMA_FLASH_ATTN_TYPE_ENABLED
    )
    params.swa_full = True  # keep all keys, so that a longer prompt continues where the one before has ended
    params.cache_ram_mib, params.warmup, params.fit_params = 0, False, False
    server = xllamacpp.Server(params)  # serves as long as this object lives
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
