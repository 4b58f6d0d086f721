"""Measures how quantized weights change a model's predictions; `python -m tools.bench weights --help`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import get_args

import torch

from config.settings import Weights, load_settings
from server.engine.build import build_engine
from server.evaluation.command import read_documents
from server.evaluation.compare import Fidelity, update_fidelities
from server.evaluation.documents import Document
from server.evaluation.flags import EvaluateOptions
from server.models.base import Model
from server.models.no_cache import NoCacheAttention
from tools.bench.runner import Case, Context, Effort, Group, Reading, Row, Table


def add_arguments(parser: ArgumentParser) -> None:
    add, formats = parser.add_argument, ["f32", "bf16", "int8", "int4"]
    add("--model", default="tiny", help="as for `kvmux serve` (default: the embedded one)")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--weights", nargs="+", default=formats, choices=get_args(Weights), help="formats, compared with the first")
    add("--kernels", default="auto", choices=("auto", "reference"), help="reference: plain torch")
    add("--length", type=int, default=1024, help="tokens of a document")
    add("--texts", type=int, default=2, help="documents of running text")
    add("--records", type=int, default=8, help="documents with answers to recall")
    add("--seed", help="seed of the generated documents")


def list_cases(context: Context) -> Iterator[Case]:
    table = Table("weights", variants_are_rows=True)
    yield Case("weights", table, partial(_measure, context.options), max_turns=1, is_timed=False)


def _measure(options: Namespace, _: None, __: str) -> Iterator[Reading]:
    """Yield the figures of all formats. Raises SettingsError."""
    flags = {"model": options.model, "dtype": options.dtype, "kernels": options.kernels, "weights_cache": "off"}
    flags |= {"max_seq_len": options.length, "max_num_seqs": 1}
    engines = [build_engine(load_settings(None, flags | {"weights": weights})) for weights in options.weights]
    wanted = EvaluateOptions(texts=options.texts, records=options.records, seed=options.seed)
    models = [engine.core.model for engine in engines]
    texts, records = (compare_models(models, part) for part in read_documents(engines[0], wanted))
    for name, model, text, record in zip(options.weights, models, texts, records, strict=True):
        right, asked = record.recall(0, options.length)
        yield Reading(Row("bytes"), model.weight_bytes, variant=name)
        yield Reading(Row("perplexity of text", digits=4), text.perplexity, variant=name)
        yield Reading(Row("likeliest token the same", "%", False, digits=4), 100 * text.agreement, variant=name)
        yield Reading(Row("KL", "nats"), text.kl, variant=name)
        yield Reading(Row("answers known", f"of {asked}", False), right, variant=name)


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


GROUP = Group(
    """\
Runs the documents of `kvmux evaluate` through the model in each weight format, without a cache, and compares the
formats with the first. All models are in memory at once, with the logits of a document: use small models.""",
    list_cases,
    add_arguments,
    Effort(1),
)
