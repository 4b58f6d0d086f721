"""What a comparison calls KV memory, with a real server and Prometheus, is the blocks that running requests hold.

The blocks of a request are known, as its prompt and its answer end in the same block. What finished requests leave in
the cache grows all the time, and does not count.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.metrics.prometheus_server import tool
from tools.comparison import __main__ as command

PROMPT, ANSWER = 300, 16  # tokens: both end in the fifth block of 64, and in the eighth of 40
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # of the embedded model: layers, keys and values, KV heads, dimensions, float32
INSTANCES = """
max_num_batched_tokens = 512
[strategies.by_40]
kind = "paged"
block_size = 40
[strategies.by_64]
kind = "paged"
block_size = 64
[strategies.whole]
kind = "contiguous"
"""


@pytest.mark.apart
@pytest.mark.timeout(240)
def test_memory_is_the_blocks_of_running_requests(tmp_path: Path) -> None:
    tool("prometheus")
    file, out = tmp_path / "kvmux.toml", tmp_path / "comparison"
    file.write_text(INSTANCES)
    names = ("by_40", "by_64", "whole")
    sizes = ["--prompt-tokens", str(PROMPT), "--max-tokens", str(ANSWER), "--batch", "1", "--rounds", "1"]
    server = ["--dtype", "float32", "--threads", "1", "--kv-memory", "256MiB"]
    flags = ["--config", str(file), "--strategies", *names, "--seconds", "4", "--no-fidelity", "--out", str(out)]
    assert command.main([*flags, *sizes, *server]) == 0

    cells = json.loads((out / command.RESULTS).read_text())["cells"]
    memory = {cell["strategy"]: cell["figures"]["kv_memory"] for cell in cells}
    longest = PROMPT + ANSWER + 1  # max_seq_len
    assert memory == {
        "by_40": 8 * 40 * TOKEN_BYTES,
        "by_64": 5 * 64 * TOKEN_BYTES,
        "whole": longest * TOKEN_BYTES,
    }
    idle = PROMPT // 2 // 64 * 64 * TOKEN_BYTES  # of a finished request, at least: what the next one does not share
    requests = min(cell["requests"] for cell in cells)
    assert requests * idle > longest * TOKEN_BYTES, "what was idle would have been noticed"
