"""`python -m tools.bench.quantized_weights`: measures how quantized weights change a model's predictions.

Runs the documents of `kvmux evaluate` through the model in each weight format, without a cache, and compares the
formats with the first. All models are in memory at once, with the logits of a document: use small models.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_args

import torch

from config.errors import SettingsError
from config.settings import Weights, load_settings
from server.engine.build import Engine, build_engine
from server.evaluation.command import read_documents
from server.evaluation.compare import Fidelity, update_fidelities
from server.evaluation.documents import Document
from server.evaluation.flags import EvaluateOptions
from server.models.base import Model
from server.models.no_cache import NoCacheAttention


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.quantized_weights", description=__doc__)
    parser.add_argument("--model", default="tiny", help="as for `kvmux serve` (default: the embedded one)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--weights", nargs="+", default=["f32", "bf16", "int8", "int4"], choices=get_args(Weights))
    parser.add_argument("--kernels", default="auto", choices=("auto", "reference"), help="reference: plain torch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a document")
    parser.add_argument("--texts", type=int, default=2, help="documents of running text")
    parser.add_argument("--records", type=int, default=8, help="documents with answers to recall")
    parser.add_argument("--seed", help="seed of the generated documents")
    options = parser.parse_args(arguments)
    flags = {"model": options.model, "dtype": options.dtype, "kernels": options.kernels, "weights_cache": "off"}
    flags |= {"max_seq_len": options.length, "max_num_seqs": 1}
    try:
        engines = [build_engine(load_settings(None, flags | {"weights": weights})) for weights in options.weights]
        wanted = EvaluateOptions(texts=options.texts, records=options.records, seed=options.seed)
        documents = read_documents(engines[0], wanted)
    except SettingsError as error:
        parser.error(str(error))
    models = [engine.core.model for engine in engines]
    print(format_table(options.weights, engines, *(compare_models(models, part) for part in documents)))


@torch.inference_mode()
def compare_models(models: Sequence[Model], documents: Sequence[Document]) -> list[Fidelity]:
    """Return the fidelity of each model's predictions on the documents to those of models[0]."""
    results = [Fidelity() for _ in models]
    for document in documents:
        ids = torch.tensor(document.ids, device=models[0].device)
        logits = []
        for model in models:
            attention = NoCacheAttention(model.layer_specs, len(ids) - 1, model.device)
            attention.logit_index = attention.positions
            logits.append(model.forward(ids[:-1], attention).float())
        # [models][n]: whether the model predicted token i + 1 of the document.
        known = update_fidelities(results, torch.stack(logits), ids[1:]).tolist()
        for result, right in zip(results, known, strict=True):
            result.answer_recalls += [(a.distance, all(right[a.start - 1 : a.stop - 1])) for a in document.answers]
    return results


def format_table(
    weights: Sequence[str], engines: Sequence[Engine], texts: Sequence[Fidelity], records: Sequence[Fidelity]
) -> str:
    """Return a Markdown table with a row for each format, as in docs/guide/models.md."""
    head = "| --weights | bytes | perplexity of text | likeliest token the same | KL, nats | answers known |"
    rows = [
        f"| {name} | {engine.core.model.weight_bytes:,} | {text.perplexity:.3f} | {text.agreement:.2%} "
        f"| {text.kl:.1e} | {'{} of {}'.format(*record.recall(0, engine.max_seq_len))} |"
        for name, engine, text, record in zip(weights, engines, texts, records, strict=True)
    ]
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    main()
