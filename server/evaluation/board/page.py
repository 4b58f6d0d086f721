"""Shows a board as a table in Markdown and as an HTML page that needs no network, no script and no other file."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jinja2 import Environment, StrictUndefined

from config.tables import format_number, format_table
from server.evaluation.board.data import FILE, Board, BoardCell, encode_board
from server.evaluation.board.settings import SettingsBlock, list_settings
from server.evaluation.board.speed import STREAMS, TOKENS, TURNS
from server.evaluation.board.verdicts import describe_length, find_pareto_line, judge
from server.evaluation.report import format_nats
from server.profiling.background_load import format_warning

TABLE, PAGE = "board.md", "board.html"
TEMPLATE = Path(__file__).with_name("board.html.jinja")
MISSING = "-"
LEAST_KL = 1e-6  # nats a token, at which exact strategies are drawn on the logarithmic axis
POINT_RADIUS, CHARACTER_WIDTH, LABEL_HEIGHT = 4, 7, 13  # in the picture; characters are not wider on average
MAX_LABEL = 40  # characters
MAX_TICKS = 5
COLUMNS = (
    *("score", "KL", "KL median", "KL 99 %", "top-1", "bytes a token", "of exact", f"peak MiB, {STREAMS} streams"),
    *("first token, s", "tokens/s, 1 stream", f"tokens/s, {STREAMS} streams"),
)
METHOD = (
    "Scores are means of the tasks. KL is the divergence from exact caching on running text, in nats a token. Bytes a "
    "token are those that a text of the length needs at most. Peak is the most KV memory that was seen in use while "
    f"tokens came. Speed is that of the engine alone, without HTTP: medians of {TURNS} turns over all strategies. "
    "Prompts are random tokens that no cache has, as many as the length has beside room for an answer; "
    f"{TOKENS} tokens of each stream are timed, with {STREAMS} streams after all have had their first one."
)


class ScatterPoint(NamedTuple):
    """A strategy in the picture, at places in pixels."""

    name: str
    label: str  # the name, shortened if it is long
    x: float
    y: float
    label_x: float  # where the label begins, or ends if it stands at the left of the point
    label_y: float
    anchor: Literal["start", "end"]
    on_line: bool


class Scatter(NamedTuple):
    """A picture of bytes a token against KL, with the Pareto line, in pixels."""

    width: int
    height: int
    left: float
    right: float
    bottom: float
    points: list[ScatterPoint]
    line: str  # the points of the Pareto line, as SVG writes them
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def make_files(board: Board, folder: Path) -> dict[str, bytes]:
    """Return the contents of the files of a board in a folder, by name."""
    blocks = list_settings(board, folder)
    table, page = make_table(board, blocks), make_page(board, blocks)
    return {FILE: encode_board(board), TABLE: table.encode(), PAGE: page.encode()}


def make_table(board: Board, blocks: Sequence[SettingsBlock]) -> str:
    """Return the board in GitHub's Markdown: a sentence for each length, settings to copy, a table for each length."""
    parts = [f"# {board.setup.model}", describe_setup(board)]
    parts += [f"- {describe_length(board, length)}" for length in board.lengths]
    parts += [f"{each.title}\n\n```toml\n{each.toml}```" for each in blocks]
    for length in board.lengths:
        rows = [[cell.strategy, *row] for cell, row in _list_rows(board, length)]
        table = format_table(["strategy", *board.setup.tasks], COLUMNS, rows)
        parts += [f"## {length:,} tokens", table]
    commands = "\n".join(f"    {command}" for command in board.commands)
    return "\n\n".join([*parts, METHOD, *find_warnings(board), commands]) + "\n"


def make_page(board: Board, blocks: Sequence[SettingsBlock]) -> str:
    """Return the same as HTML, with pictures and all figures of board.json."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    lengths = [
        {
            "title": f"{length:,} tokens",
            "sentence": describe_length(board, length),
            "rows": _list_rows(board, length),
            "scatter": place_points(board.list_cells(length)),
        }
        for length in board.lengths
    ]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        board=board,
        setup=describe_setup(board),
        lengths=lengths,
        blocks=blocks,
        columns=[*board.setup.tasks, *COLUMNS],
        method=METHOD,
        warnings=find_warnings(board),
        figures=encode_board(board).decode(),
    )


def describe_setup(board: Board) -> str:
    """Return how the board was measured, in a line."""
    setup = board.setup
    aware = ", questions asked before keys are dropped" if setup.query_aware else ""
    return (
        f"kvmux {setup.version['version']}, {setup.engine['dtype']}, weights {setup.engine['weights']}, "
        f"{setup.engine['threads']} threads of {setup.machine['processor']}; {setup.samples} samples of each task, "
        f"seed {setup.seed}{aware}; files {setup.digest}; {board.date[:10]}"
    )


def find_warnings(board: Board) -> list[str]:
    """Return a warning for each length whose speed was measured on a busy machine."""
    shares = {cell.length: cell.speed.others_share for cell in board.cells if cell.speed is not None}
    warnings = {length: format_warning(share) for length, share in shares.items()}
    return [f"Speed at {length:,} tokens: {warning}." for length, warning in warnings.items() if warning]


# ---------------------------------------------------------------- rows
def _list_rows(board: Board, length: int) -> list[tuple[BoardCell, list[str]]]:
    """Return the cells of a length, each with its row: a verdict for each task, and the figures of COLUMNS."""
    exact = board.find_cell(length, board.exact)
    return [
        (cell, [*_format_tasks(board, exact, cell), *_format_figures(exact, cell)]) for cell in board.list_cells(length)
    ]


def _format_tasks(board: Board, exact: BoardCell | None, cell: BoardCell) -> list[str]:
    scores = {task: f"{cell.quality.tasks[task].score:.0%}" for task in board.setup.tasks}
    if exact is None or exact is cell:
        return list(scores.values())
    comparisons = judge(exact.quality, cell.quality, board.margin).tasks
    return [f"{score} {comparisons[task].verdict}" for task, score in scores.items()]


def _format_figures(exact: BoardCell | None, cell: BoardCell) -> list[str]:
    quality, speed = cell.quality, cell.speed
    share = MISSING if exact is None else f"{quality.kv_bytes / exact.quality.kv_bytes:.2f}"
    kls = (format_nats(each) for each in (quality.kl_mean, quality.kl_median, quality.kl_p99))
    memory = f"{quality.kv_bytes / cell.length:,.0f}"
    figures = [f"{quality.score:.0%}", *kls, f"{quality.top1_agreement:.2%}", memory, share]
    if speed is None:
        return [*figures, *[MISSING] * (len(COLUMNS) - len(figures))]
    rates = (format_number(rate) for rate in (speed.first_token, speed.rate_1, speed.rate_8))
    return [*figures, f"{speed.held_bytes_8 / 2**20:,.1f}", *rates]


# ---------------------------------------------------------------- the picture
def place_points(cells: Sequence[BoardCell], width: int = 760, height: int = 360) -> Scatter:
    """Return the picture of some cells; the exact ones are at its bottom."""
    left, right, top, bottom = 60.0, width - 190.0, 14.0, height - 40.0
    values = {
        each.strategy: (each.quality.kv_bytes / each.length, max(each.quality.kl_mean, LEAST_KL)) for each in cells
    }
    most = 1.05 * max(memory for memory, _ in values.values())
    low, high = math.log10(LEAST_KL), max(math.ceil(math.log10(max(kl for _, kl in values.values()))), -2)

    def place(memory: float, kl: float) -> tuple[float, float]:
        x = left + (right - left) * memory / most
        return round(x, 1), round(bottom - (bottom - top) * (math.log10(kl) - low) / (high - low), 1)

    pareto = find_pareto_line(values)
    points = label_points({name: place(*value) for name, value in values.items()}, pareto, width, bottom)
    line = " ".join("{},{}".format(*place(*values[name])) for name in pareto)
    x_ticks = [(place(tick, 1)[0], f"{tick:,.12g}") for tick in choose_ticks(most)]
    y_ticks = [(place(most, 10.0**power)[1], f"{10.0**power:g}") for power in range(round(low), high + 1)]
    return Scatter(width, height, left, right, bottom, points, line, x_ticks, y_ticks)


def label_points(
    places: Mapping[str, tuple[float, float]], on_line: Collection[str], width: float, bottom: float
) -> list[ScatterPoint]:
    """Return points with labels as near to them as other labels and points leave room."""
    taken = [(x - POINT_RADIUS, x + POINT_RADIUS, y) for x, y in places.values()]  # (from x, to x, at y)
    points = []
    for name, (x, y) in sorted(places.items(), key=lambda each: -each[1][1]):  # from the bottom up
        label = name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - 1]}…"
        length, gap = CHARACTER_WIDTH * len(label), 2 * POINT_RADIUS
        fits = x + gap + length <= width
        begin = x + gap if fits else x - gap - length
        hindering = [at for low, high, at in taken if low < begin + length and begin < high]
        rows = range(LABEL_HEIGHT, round(bottom) + 1)
        free = [row for row in rows if all(abs(row - at) >= LABEL_HEIGHT for at in hindering)]
        row = min(free or rows, key=lambda row: abs(row - y))
        taken.append((begin, begin + length, row))
        anchor: Literal["start", "end"] = "start" if fits else "end"
        label_x = round(x + gap if fits else x - gap, 1)
        points.append(ScatterPoint(name, label, x, y, label_x, row, anchor, name in on_line))
    return points


def choose_ticks(most: float) -> list[float]:
    """Return the multiples, up to `most`, of a round number: 1, 2, 2.5 or 5 times a power of ten; at most five."""
    least = most / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= least)
    return [step * i for i in range(1, math.floor(most / step) + 1)]
