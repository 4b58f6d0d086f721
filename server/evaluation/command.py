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
from config.errors import SettingsError
from config.settings import Settings, StrategySettings, load
from server.engine.batch import StrategyError
from server.engine.build import Engine, build_engine
from server.engine.core import Core
from server.evaluation import documents
from server.evaluation.compare import Fidelity, compare
from server.evaluation.corpus.packing import EVALUATION_SEED
from server.evaluation.documents import Document
from server.evaluation.flags import EvaluateOptions
from server.evaluation.plot import check_plot, draw
from server.evaluation.report import EvaluationReport, StrategyResult, as_json, as_table
from server.models.files.directory import located
from server.models.load import describe
from server.text.tokenizer import Tokenizer

LONGEST = 2048  # tokens of a document, unless told
BASELINE = "exact_caching"  # compared with, if nothing that was asked for is exact
WHOLE = {"floor": "0%", "limit": "100%"}  # the memory is cut to fit the documents; shares would only get in the way
MOST_LOGITS = 1 << 26  # in a step; their softmax takes a few times their memory


def run(file: Path | None, options: dict[str, Any]) -> int:
    """`file` holds settings; `options` are the flags given, fields of Wanted and settings. Raises SettingsError."""
    wanted = EvaluateOptions(**{f.name: options.pop(f.name) for f in fields(EvaluateOptions) if f.name in options})
    check_files(wanted)
    engine, names = start(file, options, wanted)
    try:
        report = evaluate(engine, names, wanted)
    except StrategyError as error:
        raise SettingsError(str(error)) from error
    unsaved = save(report, wanted)
    print(as_table(report))
    if unsaved:
        raise SettingsError("; ".join(unsaved))
    return 0


def check_files(wanted: EvaluateOptions) -> None:
    """Before anything slow. Raises SettingsError."""
    outputs = {"--json": wanted.json, "--plot": wanted.plot}
    for flag, file in outputs.items():
        if file:
            try:
                new = not file.exists()
                file.open("ab").close()
                if new:
                    file.unlink()
            except OSError as error:
                raise SettingsError(f"{flag}: cannot write {file}: {error.strerror}") from None
    if wanted.json and wanted.plot and wanted.json.absolute() == wanted.plot.absolute():
        raise SettingsError(f"--json and --plot are both {wanted.json}: give one another name")
    if wanted.plot:
        check_plot(wanted.plot)
    if wanted.text:
        documents.check_text(wanted.text)


def save(report: EvaluationReport, wanted: EvaluateOptions) -> list[str]:
    """Writes what was asked for; what could not be written, in words."""
    unsaved = []
    for flag, file, write in (("--json", wanted.json, write_json), ("--plot", wanted.plot, draw)):
        if file:
            try:
                write(report, file)
            except OSError as error:
                unsaved.append(f"{flag}: cannot write {file}: {error.strerror}")
    return unsaved


def write_json(report: EvaluationReport, file: Path) -> None:
    file.write_text(json.dumps(as_json(report), indent=2) + "\n")


def parse_strategy(text: str) -> tuple[str, dict[str, Any]]:
    """ "paged" names an instance; "sliding_window:window=64,sinks=0" makes one of that kind, named by its options."""
    kind, colon, given = text.partition(":")
    if not colon:
        return text, {}
    pairs = [[part.strip() for part in pair.partition("=")] for pair in given.split(",")]
    options = {option: value for option, _, value in pairs}
    if not all(option and equals and value for option, equals, value in pairs) or len(options) < len(pairs):
        raise SettingsError(f"--strategy {text!r}: write KIND:option=value,option=value, each option once")
    name = "-".join([kind, *(option + value for option, value in options.items())])
    return re.sub(r"[^A-Za-z0-9_-]", "-", name), {"kind": kind, **options}


def chosen(settings: Settings, wanted: Sequence[str]) -> dict[str, StrategySettings]:
    """What was asked for, by name; all declared instances, if nothing was. Raises SettingsError."""
    strategies = {}
    for text in wanted or settings.strategies:
        name, options = parse_strategy(text)
        if options and name in settings.strategies:
            raise SettingsError(f"--strategy {text!r}: there is an instance {name} already; ask for that, or rename it")
        if not options and name not in settings.strategies:
            there = ", ".join(sorted(settings.strategies))
            raise SettingsError(
                f"--strategy: there is no instance {name!r}; there are {there}, or write KIND:option=value"
            )
        strategies[name] = StrategySettings.model_construct(**options) if options else settings.strategies[name]
    return strategies


def start(file: Path | None, flags: Mapping[str, Any], wanted: EvaluateOptions) -> tuple[Engine, list[str]]:
    """An engine with the wanted strategies and room for a document under each; their names, an exact one first."""
    settings = located(load(file, flags))
    strategies = chosen(settings, wanted.strategy)
    positions = describe(Path(settings.model), settings.model_impl).max_positions
    if wanted.length is not None and not 2 <= wanted.length <= positions:
        raise SettingsError(f"--length: between 2 and {positions} tokens, the positions of the model")
    all_of_them = {BASELINE: StrategySettings(kind="contiguous", **WHOLE)}
    all_of_them |= {name: each.model_copy(update=WHOLE) for name, each in strategies.items()}
    engine = build_engine(
        settings.model_copy(
            update={
                "strategies": all_of_them,
                "default_strategy": BASELINE,
                "rules": [],
                "max_seq_len": wanted.length or min(LONGEST, positions),
                "max_num_seqs": len(all_of_them),
            }
        )
    )
    return engine, order(engine.core.caches, list(strategies))


def evaluate(engine: Engine, names: Sequence[str], wanted: EvaluateOptions) -> EvaluationReport:
    """Reads the text and the records under the named strategies, the first of them an exact one."""
    core, length = engine.core, engine.max_seq_len
    caches = [core.caches[name] for name in names]
    row_tokens = most_row_tokens(core, caches)
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
        StrategyResult(
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
    counts = (len(text), len(records))
    return EvaluationReport(engine.name, engine.device.name, dtype, source, counts, length, row_tokens, results)


def most_row_tokens(core: Core, caches: Sequence[KVCache]) -> int:
    """Of a document, that can enter every cache in one step, and whose logits are not too many."""
    rows = [cache.contract.max_row for cache in caches if cache.contract.max_row is not None]
    step_tokens = min(core.scheduler.limits.max_num_batched_tokens, MOST_LOGITS // core.model.facts.vocab_size)
    return max(1, min([step_tokens // len(caches), *rows]))


def order(caches: Mapping[str, KVCache], names: Sequence[str]) -> list[str]:
    """The names, an exact one first, whether asked for or not: it is what the others are held against."""
    exact = next((name for name in names if caches[name].contract.exact), BASELINE)
    return list(dict.fromkeys([exact, *names]))


def read_documents(engine: Engine, wanted: EvaluateOptions) -> tuple[list[Document], list[Document]]:
    """Running text and records, in the model's tokens."""
    tokenizer = Tokenizer.from_directory(engine.directory).backend
    facts = engine.core.model.facts
    marks = documents.marks_of(tokenizer, facts.eos_ids, facts.vocab_size)
    length, seed = engine.max_seq_len, wanted.seed or EVALUATION_SEED
    if wanted.text:
        text = documents.text_file(tokenizer, marks, length, wanted.texts, wanted.text)
    else:
        text = documents.stories(tokenizer, marks, length, wanted.texts, seed)
    records = documents.records(tokenizer, marks, length, wanted.records, seed, new_phrasings=wanted.new_phrasings)
    documents.check_vocabulary([*text, *records], facts.vocab_size)
    return text, records


def progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=sys.stderr))
