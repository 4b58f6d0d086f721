"""Converts a benchmark's model to GGUF with llama.cpp's own converter. Runs in the environment of llama.cpp.

Arguments: the folder of llama.cpp's source, the model's directory, the file to write.

The converter finds out how texts are split into words by a table with the tokenizers of known models, and refuses any
other. The tokenizers of `models.py` are not known. They split texts as GPT-2 does, so the model's class is registered
once more with that answer, which replaces the converter's own class.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

PRE_TOKENIZER = "gpt-2"  # the name in GGUF files


def main() -> None:
    source, model, target = sys.argv[1:]
    sys.path.insert(0, source)
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", target, "--outtype", "bf16"]
    converter: Any = import_module("convert_hf_to_gguf")  # first: it makes gguf-py importable
    base: Any = import_module("conversion.base").ModelBase
    original: Any = import_module("conversion.qwen").Qwen2Model

    class BenchmarkModel(original):  # type: ignore[misc]
        """A Qwen2 model whose tokenizer splits texts as GPT-2's does."""

        model_arch = original.model_arch  # the base class asks each class for its own

        def get_vocab_base_pre(self, tokenizer: Any) -> str:
            return PRE_TOKENIZER

    base.register("Qwen2ForCausalLM")(BenchmarkModel)
    converter.main()


if __name__ == "__main__":
    main()
