"""lm-eval's local-completions: log-likelihoods as transformers has them, and texts up to a stop string.

The expected numbers come with the check (expected.json, written by tests/clients/lm_eval/expect.py with transformers).
"""

import json
import sys
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

URL, MODEL = sys.argv[1:]
TOLERANCE = 1e-3  # per token
EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text())

lm = LocalCompletionsAPI(
    model=MODEL,
    base_url=f"{URL}/v1/completions",
    tokenizer_backend="huggingface",
    tokenizer=str(Path(__file__).parents[3] / "server/models/tiny"),
    batch_size=3,
    num_concurrent=2,
    max_retries=1,
)


def asked(kind: str, arguments: list[tuple[object, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


pairs = [(context, continuation) for context, continuation, *_ in EXPECTED]
found = lm.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)
for (logprob, greedy), (context, _, tokens, expected, is_greedy) in zip(found, EXPECTED, strict=True):
    assert abs(logprob - expected) < TOLERANCE * tokens, (context, logprob, expected)
    assert greedy == is_greedy, context

# As many stop strings as HumanEval has.
STOPS = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@", "\nassert", "\n\n\n", "."]
prompts = ("Once upon a time", "The cat", "def add(a, b):")
until = {"until": STOPS, "max_gen_toks": 40, "do_sample": False}
texts = lm.generate_until(asked("generate_until", [(prompt, until) for prompt in prompts]), disable_tqdm=True)
assert texts[0]
assert not any(stop in text for text in texts for stop in STOPS)
