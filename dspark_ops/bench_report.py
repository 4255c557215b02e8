"""What the benchmark shows and writes: progress, tables, JSON, CSV and a plot. rich and matplotlib are imported where they are used."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]  # what was measured for a shape in a state of the L2 cache, by the names below; times are microseconds a block

# "lm_head" is the product before every block: it is subtracted from the times of the state "cold" and part of those of "sum".
CANDIDATES = ("block", "step", "two launches", "compiled", "plain", "vLLM loop", "fallback, eager", "plain, eager")
RATIOS = ("two launches / best", "best / floor")  # of the fastest fused plan
FIGURES = ("lm_head", *CANDIDATES, *RATIOS, "MB", "floor")
COLUMNS = ("V", "K", "rank", "logits", "R", "L2", *FIGURES, "tokens agree", "caches agree")


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _by_rich() -> bool:
    return sys.stdout.isatty() and has("rich")


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Shows how far a run of `total` parts is, by a bar in a terminal and by lines elsewhere; call what it yields as each part begins."""
    begun = itertools.count()
    if not _by_rich():
        if sys.stdout.isatty():
            print("for a bar and drawn tables: pip install rich", file=sys.stderr)
        yield lambda text: print(f"[{next(begun) + 1}/{total}] {text} ...", file=sys.stderr, flush=True)
        return
    from rich import get_console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=get_console(), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, description=text, completed=next(begun))


def _cell(column: str, line: Line) -> str:
    if column == "agree":
        wrong = [what for what in ("tokens", "caches") if not line[f"{what} agree"]]
        return f"NOT {', '.join(wrong)}" if wrong else "yes"
    value = line.get(column)
    if isinstance(value, float):
        return f"{value:.2f}" if column in RATIOS else f"{value:.1f}"
    return "-" if value is None else str(value)


def table(lines: list[Line]) -> list[list[str]]:
    """Cells of a table, its head first; a figure that no line has takes no column."""
    columns = ["R", "L2", *(name for name in FIGURES if any(line.get(name) is not None for line in lines)), "agree"]
    return [columns, *([_cell(column, line) for column in columns] for line in lines)]


def show(title: str, lines: list[Line]) -> None:
    """Prints the lines as a table."""
    head, *rows = table(lines)
    if not _by_rich():
        widths = [max(len(cell) for cell in cells) for cells in zip(head, *rows, strict=True)]
        print(title)
        for row in (head, *rows):
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), flush=True)
        return
    from rich import box, get_console
    from rich.table import Table

    drawn = Table(*(name.replace(" ", "\n") for name in head), title=title, box=box.SIMPLE_HEAD, padding=0)
    for column in drawn.columns:
        column.justify, column.overflow = "right", "fold"  # in a narrow terminal no digit is lost
    for row in rows:
        drawn.add_row(*row)
    get_console().print(drawn)


def write(
    about: dict[str, str], lines: list[Line], *, json_file: Path | None = None, csv_file: Path | None = None, png_file: Path | None = None
) -> None:
    """Writes the lines to the files that are given; `about` says what they were measured on."""
    if json_file is not None:
        json_file.write_text(json.dumps({**about, "results": lines}, indent=1))
    if csv_file is not None:
        with csv_file.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(lines)
    if png_file is not None:
        _plot(about, lines, png_file)


def _plot(about: dict[str, str], lines: list[Line], png_file: Path) -> None:
    """Time over R on logarithmic axes: a panel for each shape and state of the L2 cache, a curve for each candidate, the floor dashed."""
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys((line["V"], line["K"], line["rank"]) for line in lines))
    states = list(dict.fromkeys(line["L2"] for line in lines))
    figure = Figure(figsize=(6 * len(states), 4.5 * len(shapes)), layout="constrained")
    figure.suptitle(f"{about['device']}, torch {about['torch']}, {lines[0]['logits']} logits, {about['unit']}")
    panels = figure.subplots(len(shapes), len(states), squeeze=False)
    for (i, (vocab, steps, rank)), (j, state) in itertools.product(enumerate(shapes), enumerate(states)):
        panel = panels[i, j]
        here = [line for line in lines if (line["V"], line["K"], line["rank"], line["L2"]) == (vocab, steps, rank, state)]
        for color, name in enumerate((*CANDIDATES, "floor")):
            points = sorted((line["R"], line[name]) for line in here if line.get(name) is not None)
            if points:
                style = {"color": "black", "linestyle": "dashed"} if name == "floor" else {"color": f"C{color}", "marker": "o"}
                panel.plot(*zip(*points, strict=True), label=name, **style)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        rows = sorted({line["R"] for line in here})
        panel.set_xticks(rows, labels=[str(row) for row in rows])
        panel.set(title=f"V = {vocab}, rank {rank}, K = {steps}, L2 {state}", xlabel="R", ylabel=about["unit"])
        panel.legend(fontsize="small")
    figure.savefig(png_file, format="png")
