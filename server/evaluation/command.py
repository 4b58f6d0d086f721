"""`kvmux evaluate`: from the command line's options to a report. Wires the engine, the documents and the comparison."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from cache_strategies.base import KVCache
from config.settings import SettingsError, load
from server.engine.build import Engine, build_engine
from server.evaluation import documents
from server.evaluation.compare import Fidelity, compare
from server.evaluation.documents import Document
from server.evaluation.flags import Wanted
from server.evaluation.plot import check_plot, draw
from server.evaluation.report import Report, Result, as_json, as_table
from server.models.config import load_config, model_directory
from server.text.tokenizer import Tokenizer
from server.training.packing import EVALUATION_SEED

LONGEST = 2048  # tokens of a document, unless told


def run(file: Path | None, options: dict[str, Any]) -> int:
    """`file` holds settings; `options` are the flags given, fields of Wanted and settings. Raises SettingsError."""
    wanted = Wanted(**{f.name: options.pop(f.name) for f in fields(Wanted) if f.name in options})
    check_outputs(wanted)
    strategies = dict(parse_strategy(text) for text in wanted.strategy)
    engine = start(file, options, strategies, wanted.length)
    report = evaluate(engine, list(strategies), wanted)
    print(as_table(report))
    for flag, file, save in (("--json", wanted.json, save_json), ("--plot", wanted.plot, draw)):
        if file:
            try:
                save(report, file)
            except OSError as error:
                raise SettingsError(f"{flag}: cannot write {file}: {error.strerror}") from None
    return 0


def save_json(report: Report, file: Path) -> None:
    file.write_text(json.dumps(as_json(report), indent=2) + "\n")


def check_outputs(wanted: Wanted) -> None:
    """Before anything slow. Raises SettingsError."""
    for flag, file in (("--json", wanted.json), ("--plot", wanted.plot)):
        if file and not file.absolute().parent.is_dir():
            raise SettingsError(f"{flag} {file}: there is no folder {file.parent}")
        if file and file.is_dir():
            raise SettingsError(f"{flag} {file}: that is a folder")
    if wanted.plot:
        check_plot(wanted.plot)


def parse_strategy(text: str) -> tuple[str, dict[str, Any]]:
    """ "paged" names an instance; "sliding_window:window=64,sinks=0" makes one of that kind, named by its options."""
    kind, colon, given = text.partition(":")
    if not colon:
        return text, {}
    pairs = [pair.partition("=") for pair in given.split(",")]
    options = {option: value for option, _, value in pairs}
    if not all(option and equals and value for option, equals, value in pairs) or len(options) < len(pairs):
        raise SettingsError(f"--strategy {text}: write KIND:option=value,option=value, each option once")
    name = "-".join([kind, *(option + value for option, value in options.items())])
    return re.sub(r"[^A-Za-z0-9_-]", "-", name), {"kind": kind, **options}


def start(
    file: Path | None, flags: Mapping[str, Any], strategies: Mapping[str, dict[str, Any]], length: int | None
) -> Engine:
    """An engine with these strategies beside the declared ones, and room for one document under each."""
    declared = load(file, flags)
    made = {name: options for name, options in strategies.items() if options}
    for name in strategies:
        if name not in made and name not in declared.strategies:
            there = ", ".join(sorted(declared.strategies))
            raise SettingsError(
                f"--strategy: there is no instance {name!r}; there are {there}, or write KIND:option=value"
            )
    positions = load_config(model_directory(declared.model)).max_positions
    if length is not None and not 2 <= length <= positions:
        raise SettingsError(f"--length: between 2 and {positions} tokens, the positions of the model")
    count = len(declared.strategies) + len(made)
    fixed = {"max_seq_len": length or min(LONGEST, positions), "max_num_seqs": count, "strategies": made}
    return build_engine(load(file, {**flags, **fixed}))


def evaluate(engine: Engine, names: Sequence[str], wanted: Wanted) -> Report:
    """Reads the text and the records under the named strategies, or all; an exact one comes first."""
    core, length = engine.core, engine.max_seq_len
    names = order(engine, names or list(core.caches))
    caches = [core.caches[name] for name in names]
    row_tokens = most_row_tokens(core.scheduler.limits.max_step_tokens, caches)
    row_tokens = min(wanted.row_tokens or row_tokens, row_tokens)
    text, records = read_documents(engine, wanted)
    with progress() as bars:
        task = bars.add_task("reading", total=sum(len(d.ids) - 1 for d in (*text, *records)))
        found: list[Sequence[Fidelity]] = [
            compare(core.model, caches, each, row_tokens=row_tokens, read=lambda n: bars.advance(task, n))
            for each in (text, records)
        ]
    instances = {instance.name: instance for instance in engine.instances}
    results = [
        Result(
            cache.name,
            instances[cache.name].kind,
            instances[cache.name].options.model_dump(),
            cache.contract.exact,
            cache.bytes_for(length),
            *fidelity,
        )
        for cache, *fidelity in zip(caches, *found, strict=True)
    ]
    dtype = str(core.model.dtype).removeprefix("torch.")
    source = str(wanted.text or "stories")
    return Report(engine.name, str(core.model.device), dtype, source, length, row_tokens, results)


def most_row_tokens(step_tokens: int, caches: Sequence[KVCache]) -> int:
    """Of a document, that can enter every cache in one step."""
    rows = [cache.contract.max_row for cache in caches if cache.contract.max_row is not None]
    return max(1, min([step_tokens // len(caches), *rows]))


def order(engine: Engine, names: Sequence[str]) -> list[str]:
    """The names, an exact one first, whether asked for or not: it is what the others are held against."""
    exact = [name for name in (*names, *engine.core.caches) if engine.core.caches[name].contract.exact]
    if not exact:
        raise SettingsError("no strategy here is exact: declare one of kind contiguous, to compare with")
    return list(dict.fromkeys([exact[0], *names]))


def read_documents(engine: Engine, wanted: Wanted) -> tuple[list[Document], list[Document]]:
    """Running text and records, in the model's tokens."""
    tokenizer = Tokenizer.from_directory(engine.directory).backend
    marks = documents.marks_of(tokenizer, engine.core.model.config.eos_ids)
    length, seed = engine.max_seq_len, wanted.seed or EVALUATION_SEED
    if wanted.text:
        text = documents.text_file(tokenizer, marks, length, wanted.texts, wanted.text)
    else:
        text = documents.stories(tokenizer, marks, length, wanted.texts, seed)
    return text, documents.records(tokenizer, marks, length, wanted.records, seed, new_phrasings=wanted.new_phrasings)


def progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=sys.stderr))
