"""`kvmux evaluate`: builds an engine and documents from the command line's options, compares, writes the report."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from cache_strategies.errors import StrategyError
from cache_strategies.registry import list_kinds
from cache_strategies.scorers import list_scorers
from config.errors import SettingsError, convert_write_errors
from config.flags import flag_name, format_flag, format_flags
from config.presets import PRESETS
from config.settings import Settings, StrategySettings, load_settings
from server.cli.flags import pop_settings_file
from server.engine.build import Engine, build_engine
from server.engine.core import Core
from server.engine.instance import Instance
from server.evaluation import documents
from server.evaluation.board.data import FILE as BOARD_FILE
from server.evaluation.board.page import PAGE as BOARD_PAGE
from server.evaluation.board.page import TABLE as BOARD_TABLE
from server.evaluation.board.runner import BoardRunner, BoardSource, choose_lengths
from server.evaluation.board.speed import STREAMS
from server.evaluation.compare import Fidelity, compare
from server.evaluation.documents import Document
from server.evaluation.flags import EvaluateOptions
from server.evaluation.plot import check_plot, save_plot
from server.evaluation.report import EvaluationReport, StrategyResult, as_json, as_table
from server.evaluation.suites.command import QUICK_LENGTH, make_runner, run_suites
from server.models.files.directory import resolve_model_settings
from server.models.load import read_model_info
from server.text.tokenizer import Tokenizer

DEFAULT_MAX_LENGTH = 2048  # maximum number of tokens of a document if --length is not given
BASELINE = "exact_caching"  # name of the exact instance that is added if no chosen strategy is exact
# Options of each strategy: none reserves memory, and each may use all of it, as it holds only one document at a time.
WHOLE = {"floor": "0%", "limit": "100%"}
INTERRUPTED = 130  # exit status after Ctrl-C, as of shells
MIN_QUESTION_AT = 128  # tokens; records that are much shorter have no question far from its fact
MAX_ANSWER_TOKENS = 32  # room for an answer after the question
QUICK_TEXTS = 2  # documents of running text with --quick
# Of a board for which no strategies are given
BOARD_STRATEGIES = (
    *PRESETS,
    "paged:k_dtype=int8,v_dtype=int8",
    "paged:k_dtype=int4,v_dtype=int4",
    "residual",
    "compressed:scorer=keydiff,budget=0.5",
    "compressed:scorer=keydiff,budget=0.25",
    "sliding_window:window=512",
)
INTERRUPTED_BOARD = "Interrupted; the same command goes on."
MAX_LOGITS = 1 << 26  # maximum number of logits of a step, of all its tokens; softmax takes a few times their memory


def run(flags: dict[str, Any]) -> int:
    """Run an evaluation; `flags` are fields of EvaluateOptions and settings. Return the exit status.

    Raises SettingsError for wrong flags or settings, for files that cannot be read or written, or for lack of memory.
    """
    options = EvaluateOptions(**{f.name: flags.pop(f.name) for f in fields(EvaluateOptions) if f.name in flags})
    if options.board:
        return run_board(options.board, options, pop_settings_file(flags), flags)
    if options.lengths:
        raise SettingsError("--lengths: belongs to --board; without it, give --length")
    if options.quick:
        length, texts = options.length or QUICK_LENGTH, min(options.texts, QUICK_TEXTS)
        options = replace(options, length=length, texts=texts, records=0)
    check_files(options)
    engine, names = start_engine(pop_settings_file(flags), flags, options)
    try:
        runner = make_runner(engine, names, options) if options.has_suites else None
        report = evaluate(engine, names, options)
        if runner is not None:
            with make_progress_bar() as bars:
                report = replace(report, suites=run_suites(runner, options, engine.max_seq_len, bars))
    except StrategyError as error:
        raise SettingsError(str(error)) from error
    unsaved = write_outputs(report, options)
    print(as_table(report))
    if unsaved:
        raise SettingsError("; ".join(unsaved))
    return INTERRUPTED if report.suites is not None and report.suites.is_interrupted else 0


def format_command(options: EvaluateOptions, file: Path | None, settings: Mapping[str, Any]) -> str:
    """Return the command that gives these options and settings, as a shell reads it."""
    config = {} if file is None else {"config": file}
    given = [part for name, value in {**config, **settings}.items() for part in format_flag(name, value)]
    return shlex.join(["kvmux", "evaluate", *given, *format_flags(options)])


def run_board(folder: Path, options: EvaluateOptions, file: Path | None, flags: Mapping[str, Any]) -> int:
    """Measure what is missing of the board in a folder, and print where it is. Return the exit status."""
    for flag in ("length", "json", "plot", "question_at"):
        if getattr(options, flag) is not None:
            raise SettingsError(
                f"{flag_name(flag)}: leave it out with --board, which has --lengths and files of its own"
            )
    command = format_command(options, file, flags)
    options = replace(
        options, strategy=options.strategy or BOARD_STRATEGIES, texts=min(options.texts, QUICK_TEXTS), records=0
    )
    settings = resolve_model_settings(load_settings(file, flags))
    lengths = choose_lengths(options.lengths, read_model_info(Path(settings.model), settings.model_impl).max_positions)
    with convert_write_errors("--board", folder):
        folder.mkdir(parents=True, exist_ok=True)

    def start(length: int) -> tuple[Engine, list[str]]:
        return start_engine(file, flags, replace(options, length=length))

    def read_text(engine: Engine, names: Sequence[str], bars: Progress) -> Sequence[StrategyResult]:
        return evaluate(engine, names, replace(options, length=engine.max_seq_len), bars).results

    try:
        with make_progress_bar() as bars:
            is_whole = BoardRunner(folder, options, BoardSource(start, read_text, command), bars).run(lengths)
    except (StrategyError, SettingsError) as error:  # which name the flag of evaluations without a board
        raise SettingsError(re.sub(r"--length\b", "--lengths", str(error))) from error
    table = folder / BOARD_TABLE
    if table.exists():
        print(table.read_text(encoding="utf-8"))
    print(f"{folder / BOARD_FILE}, {table}, {folder / BOARD_PAGE}" if is_whole else INTERRUPTED_BOARD)
    return 0 if is_whole else INTERRUPTED


def check_files(options: EvaluateOptions) -> None:
    """Raise SettingsError, before any slow work, if an input or output file cannot be opened."""
    outputs = {"--json": options.json, "--plot": options.plot}
    for flag, file in outputs.items():
        if file:
            with convert_write_errors(flag, file):
                new = not file.exists()
                file.open("ab").close()
                if new:
                    file.unlink()
    if options.json and options.plot and options.json.absolute() == options.plot.absolute():
        raise SettingsError(f"--json and --plot are both {options.json}: give them different names")
    if options.plot:
        check_plot(options.plot)
    if options.text:
        documents.check_text_file(options.text)


def write_outputs(report: EvaluationReport, options: EvaluateOptions) -> list[str]:
    """Write the files of --json and --plot, if given; return a message for each that could not be written."""
    unsaved = []
    for flag, file, write in (("--json", options.json, write_json), ("--plot", options.plot, save_plot)):
        if file:
            try:
                with convert_write_errors(flag, file):
                    write(report, file)
            except SettingsError as error:
                unsaved.append(str(error))
    return unsaved


def write_json(report: EvaluationReport, file: Path) -> None:
    file.write_text(json.dumps(as_json(report), indent=2) + "\n")


def parse_strategy(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and options of a --strategy argument.

    "paged" is the name of an instance, without options; "sliding_window:window=64,sinks=0" is a new instance, whose
    name is made of its kind and options. The kind may be a class, as in "my_package:MyCache:window=64". A dot leads
    into an option that is a table, as in TOML: "scorer_options.width=3".

    Raises SettingsError if the options are not written as in these examples.
    """
    kind, colon, given = text.partition(":")
    cls, _, of_class = given.partition(":")
    if cls.isidentifier() and kind not in list_kinds():
        kind, given = f"{kind}:{cls}", of_class
    if not colon:
        return text, {}
    if not given and ":" in kind:
        return re.sub(r"[^A-Za-z0-9_-]", "-", kind), {"kind": kind}
    pairs = [[part.strip() for part in pair.partition("=")] for pair in given.split(",")]
    options = {option: value for option, _, value in pairs}
    if not all(option and equals and value for option, equals, value in pairs) or len(options) < len(pairs):
        raise SettingsError(f"--strategy {text!r}: write KIND:option=value,option=value, each option once")
    name = "-".join([kind, *(option + value for option, value in options.items())])
    try:
        return re.sub(r"[^A-Za-z0-9_-]", "-", name), {"kind": kind, **nest_options(options)}
    except ValueError as error:
        raise SettingsError(f"--strategy {text!r}: {error}") from None


def nest_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return {"a": {"b": value}} for {"a.b": value}.

    Raises ValueError if a part of a name is empty, or if an option is a table and has a value, too.
    """
    nested: dict[str, Any] = {}
    for path, value in options.items():
        *tables, option = path.split(".")
        if not all((*tables, option)):
            raise ValueError(f"{path!r} has a dot without a name on both sides")
        table = nested
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ValueError(f"{path!r}: {name!r} has a value, too; give it either options or a value")
        if option in table:
            raise ValueError(f"{path!r} has options, too; give it either options or a value")
        table[option] = value
    return nested


def select_strategies(settings: Settings, wanted: Sequence[str]) -> dict[str, StrategySettings]:
    """Return the strategies that `wanted` lists, by name, or all instances in the settings if it is empty.

    A kind without an instance of its name stands for one with its default options, and so does a preset.

    Raises SettingsError if a name is unknown, or if a new instance would get the name of another one.
    """
    strategies = {}
    for text in wanted or settings.strategies:
        name, options = parse_strategy(text)
        if not options and name not in settings.strategies and name in list_kinds():
            options = {"kind": name}
        if not options and name not in settings.strategies and name in PRESETS:
            options = dict(PRESETS[name].settings)
        if options and name in settings.strategies:
            raise SettingsError(
                f"--strategy {text!r}: an instance {name} already exists; give --strategy {name}, or rename it"
            )
        if not options and name not in settings.strategies:
            there = ", ".join(sorted(settings.strategies))
            scorer = f"; {name} is a scorer: write compressed:scorer={name}" if name in list_scorers() else ""
            raise SettingsError(
                f"--strategy: there is no instance {name!r}; there are {there}, or write KIND:option=value{scorer}"
            )
        strategies[name] = StrategySettings.model_construct(**options) if options else settings.strategies[name]
    return strategies


def start_engine(file: Path | None, flags: Mapping[str, Any], options: EvaluateOptions) -> tuple[Engine, list[str]]:
    """Build an engine with room for one document under each strategy.

    Return (the engine, the names of the strategies). The first is exact, unless documents are longer than the model's
    context: then no strategy can be. Raises SettingsError for wrong settings, or if --strategy or --length does not fit
    them.
    """
    settings = resolve_model_settings(load_settings(file, flags))
    strategies = select_strategies(settings, options.strategy)
    positions = read_model_info(Path(settings.model), settings.model_impl).max_positions
    if options.length == 1:
        raise SettingsError(f"--length: should be from 2 to {positions} tokens, the context of the model")
    length = options.length or min(DEFAULT_MAX_LENGTH, positions)
    max_seq_len = length if length <= positions else min(DEFAULT_MAX_LENGTH, positions)
    if options.question_at is not None and not MIN_QUESTION_AT <= options.question_at <= length - MAX_ANSWER_TOKENS:
        raise SettingsError(
            f"--question-at: should be from {MIN_QUESTION_AT} to {length - MAX_ANSWER_TOKENS}: the facts stand before "
            f"the question, and the answer after it, within --length {length}"
        )
    # Questions of suites find the context again if the strategy shares prefixes
    kind = "paged" if options.has_suites else "contiguous"
    all_of_them = {BASELINE: StrategySettings(kind=kind, **WHOLE)}
    all_of_them |= {name: each.model_copy(update=WHOLE | {"fallback": None}) for name, each in strategies.items()}
    engine = build_engine(
        settings.model_copy(
            update={
                "strategies": all_of_them,
                "default_strategy": BASELINE,
                "rules": [],
                "max_seq_len": max_seq_len,
                "max_num_seqs": max(len(all_of_them), STREAMS if options.has_suites else 1),
            }
        )
    )
    names = list(strategies)
    if length <= positions:
        return engine, order_strategies(engine.core.instances, names)
    if options.has_suites:
        raise SettingsError(f"--length: should be at most {positions}, the context of the model, with suites")
    if bounded := [name for name in names if not engine.core.instances[name].contract.unbounded]:
        raise SettingsError(
            f"--length: should be from 2 to {positions} tokens, the context of the model; only strategies with an "
            f"unbounded contract can read a longer document, and there is {', '.join(bounded)}"
        )
    return engine, names


def evaluate(
    engine: Engine, names: Sequence[str], options: EvaluateOptions, bars: Progress | None = None
) -> EvaluationReport:
    """Run the model on all documents under the named strategies; compare their results with those of the first one.

    The progress is shown among `bars` if there are any.
    """
    core, length = engine.core, options.length or engine.max_seq_len
    instances = [core.instances[name] for name in names]
    row_tokens = compute_max_row_tokens(core, instances)
    row_tokens = min(options.row_tokens or row_tokens, row_tokens)
    longest_row = 0
    text, records = read_documents(engine, options)
    with nullcontext(bars) if bars else make_progress_bar() as shown:
        task = shown.add_task("reading", total=sum(len(d.ids) - 1 for d in (*text, *records)))

        def count_step(num_tokens: int) -> None:
            nonlocal longest_row
            longest_row = max(longest_row, num_tokens)
            shown.advance(task, num_tokens)

        fidelities: list[Sequence[Fidelity]] = [
            compare(core.model, instances, each, row_tokens=row_tokens, last=last, on_tokens_read=count_step)
            for each, last in ((text, options.last), (records, None))
        ]
    declared = {each.name: each for each in engine.instances}
    results = [
        StrategyResult(
            instance.name,
            declared[instance.name].kind,
            declared[instance.name].options.model_dump(),
            instance.contract.exact,
            instance.bytes_for(length),
            *fidelity,
        )
        for instance, *fidelity in zip(instances, *fidelities, strict=True)
    ]
    dtype = str(core.model.dtype).removeprefix("torch.")
    source = str(options.text or "stories")
    counts = (len(text), len(records))
    return EvaluationReport(engine.model_name, engine.device.name, dtype, source, counts, length, longest_row, results)


def compute_max_row_tokens(core: Core, instances: Sequence[Instance]) -> int:
    """Return how many tokens of a document one step computes at most, within MAX_LOGITS logits."""
    step_tokens = min(core.scheduler.limits.max_num_batched_tokens, MAX_LOGITS // core.model.info.vocab_size)
    return max(1, step_tokens // len(instances))


def order_strategies(instances: Mapping[str, Instance], names: Sequence[str]) -> list[str]:
    """Return the names with an exact strategy first; add that of BASELINE if none of them is exact."""
    exact = next((name for name in names if instances[name].contract.exact), BASELINE)
    return list(dict.fromkeys([exact, *names]))


def read_documents(engine: Engine, options: EvaluateOptions) -> tuple[list[Document], list[Document]]:
    """Return (documents of running text, records with facts and questions), as token ids.

    Raises SettingsError if --text cannot be read, --length is too short or the tokenizer does not fit the model.
    """
    tokenizer = Tokenizer.from_directory(engine.model_dir).backend
    info = engine.core.model.info
    marks = documents.find_special_tokens(tokenizer, info.eos_ids, info.vocab_size)
    length, seed = options.length or engine.max_seq_len, options.seed
    if options.text:
        text = documents.read_text_file(tokenizer, marks, length, options.texts, options.text)
    else:
        text = documents.make_stories(tokenizer, marks, length, options.texts, seed)
    count, new = options.records, options.new_phrasings
    if not count:
        records = []
    elif options.question_at is None:
        records = documents.make_records(tokenizer, marks, length, count, seed, new_phrasings=new)
    else:
        records = documents.make_questions(tokenizer, marks, options.question_at, count, seed, new_phrasings=new)
    documents.check_vocabulary([*text, *records], info.vocab_size)
    return text, records


def make_progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=sys.stderr))
