"""`python -m tests.clients.lm_eval.expect`: log-likelihoods of the embedded model by transformers, for check.py."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from server.models.files.directory import locate

PAIRS = [
    ("Once upon a time", " there was a small cat"),
    ("Once upon a time there was a", " dragon who had a red ball and went to the market."),
    ("The", " old man was very happy"),
    ("Hello!", " xylophone"),
    ("A long beginning of many words," + " which is cut into several steps," * 30, " and then it ends."),
]


@torch.inference_mode()
def main() -> None:
    directory = locate("tiny", None)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    ids = tokenizer.encode(PAIRS[0][0], add_special_tokens=False)
    likeliest = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
    told = []
    for context, continuation in (*PAIRS, (PAIRS[0][0], tokenizer.decode(likeliest))):
        ids = tokenizer.encode(context + continuation, add_special_tokens=False)
        after = ids[len(tokenizer.encode(context, add_special_tokens=False)) :]
        logprobs = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)[-len(after) :]
        own = logprobs.gather(1, torch.tensor(after)[:, None])[:, 0]
        greedy = bool((logprobs.argmax(-1) == torch.tensor(after)).all())
        told.append([context, continuation, len(after), float(own.sum()), greedy])
    Path(__file__).with_name("expected.json").write_text(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
