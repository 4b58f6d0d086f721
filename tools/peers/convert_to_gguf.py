"""Converts a model to GGUF with llama.cpp's own converter. Runs in the environment of llama.cpp.

Arguments: the folder of llama.cpp's source, the model's directory, the file to write, the type of its matrices (bf16,
f16 or q8_0), and llama.cpp's name for how the tokenizer splits texts.

The converter finds out how texts are split by a table with the tokenizers of known models, and refuses any other. The
tokenizers of kvmux's own models are not known, so the model's class is registered once more with the right answer,
which replaces the converter's own class.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

CLASSES = {  # of the converter, by architecture
    "LlamaForCausalLM": ("conversion.llama", "LlamaModel"),
    "Qwen2ForCausalLM": ("conversion.qwen", "Qwen2Model"),
}


def main() -> None:
    source, model, target, matrix_type, pre_tokenizer = sys.argv[1:]
    sys.path.insert(0, source)
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", target, "--outtype", matrix_type]
    converter: Any = import_module("convert_hf_to_gguf")  # first: it makes gguf-py importable
    base: Any = import_module("conversion.base").ModelBase
    (architecture,) = json.loads((Path(model) / "config.json").read_text())["architectures"]
    module, name = CLASSES[architecture]
    original: Any = getattr(import_module(module), name)

    class ConvertedModel(original):  # type: ignore[misc]
        """A model whose tokenizer splits texts as `pre_tokenizer` says."""

        model_arch = original.model_arch  # the base class asks each class for its own

        def get_vocab_base_pre(self, tokenizer: Any) -> str:
            return pre_tokenizer

    base.register(architecture)(ConvertedModel)
    converter.main()


if __name__ == "__main__":
    main()
