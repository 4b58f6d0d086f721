"""Our folder `kernels` and transformers live in one environment."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata


def test_transformers_imports_beside_our_kernels() -> None:
    """It takes any `kernels` for Hugging Face's and looks at its version; see docs/internals/why.md."""
    code = "import kernels.types; from transformers import LlamaForCausalLM; print(LlamaForCausalLM.__name__)"
    result = subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "LlamaForCausalLM", result.stderr


def test_the_version_is_outside_the_range_that_transformers_stumbles_over() -> None:
    assert metadata.version("kvmux") >= "1.0.0"
