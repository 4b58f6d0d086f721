"""aiperf: texts and chats, streamed; it counts the tokens that it asked for, and no request fails."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1:]
AIPERF = Path(sys.executable).with_name("aiperf")
TOKENIZER = Path(__file__).parents[3] / "server/models/tiny"
REQUESTS, PROMPT, ANSWER = 16, 60, 20  # PROMPT and ANSWER in tokens


def report(kind: str) -> dict[str, dict[str, float]]:
    """What aiperf says after REQUESTS requests to the endpoint of that kind."""
    asked = {
        "--model": MODEL,
        "--url": URL,
        "--endpoint-type": kind,
        "--tokenizer": TOKENIZER,
        "--concurrency": 4,
        "--request-count": REQUESTS,
        "--synthetic-input-tokens-mean": PROMPT,
        "--output-tokens-mean": ANSWER,
        "--extra-inputs": "ignore_eos:true",
        "--ui": "none",
    }
    flags = [str(word) for pair in asked.items() for word in pair] + ["--streaming", "--use-server-token-count"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([AIPERF, "profile", *flags, "--artifact-dir", folder], check=True, stdout=subprocess.DEVNULL)
        (told,) = Path(folder).rglob("profile_export_aiperf.json")
        return json.loads(told.read_text())


for kind in ("completions", "chat"):
    told = report(kind)
    assert told["request_count"]["avg"] == REQUESTS, told
    assert not told.get("error_request_count"), told
    assert told["output_sequence_length"]["avg"] == ANSWER, told
    assert told["inter_token_latency"]["min"] > 0, told
    # A template adds its own tokens to a chat's.
    length = told["input_sequence_length"]["avg"]
    assert length == PROMPT if kind == "completions" else length >= PROMPT, told
