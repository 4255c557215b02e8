"""The benchmark: its options, the model of the floor, what it makes of its measurements, and what it shows and writes."""

from __future__ import annotations

import csv
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import gpu
from torch import Tensor

from dspark_ops import bench, bench_report, markov_sample_sequential
from dspark_ops.bench import Shape
from dspark_ops.bench_report import Line


def _line(rows: int = 1, l2: str = "warm", **figures: object) -> Line:
    shape = {"V": 163840, "K": 7, "rank": 256, "logits": "random", "R": rows, "L2": l2}
    return {**shape, "block": 112.26, "plain": 454.0 * rows, "tokens agree": True, "caches agree": True, **figures}


LINES = [
    _line(1, floor=105.7, **{"best / floor": 1.062}),
    _line(64, block=365.0, floor=157.3, **{"best / floor": 2.32, "caches agree": False}),
    _line(1, "sum", lm_head=520.0, block=640.0, floor=None, **{"best / floor": None}),
]
ABOUT = {"device": "a card", "torch": "2.11", "unit": "microseconds a block"}


# ---- Options ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rows", "0"], "argument --rows: must be at least 1, got 0"),
        (["--steps", "-1"], "argument --steps: must be at least 1, got -1"),
        (["--vocab", "many"], "argument --vocab: invalid"),
        (["--rank", "48"], "argument --rank: must be a power of two from 16 to 512, which all candidates serve, got 48"),
        (["--all", "--vocab", "100"], "argument --all: must stand without --vocab"),
        (["--logits", "flat"], "argument --logits: invalid choice: 'flat'"),
        (["--json", "no/such/times.json"], "argument --json: must be a file in a directory that exists, got no/such/times.json: make no/such"),
        (["--csv", "."], "argument --csv: must be a file, got the directory .: name a file in it"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench.main(options)
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench.os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(SystemExit):
        bench.main(["--csv", str(tmp_path / "times.csv")])
    assert "argument --csv: must be a file that can be written" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_report, "has", lambda package: package != "matplotlib")
    with pytest.raises(SystemExit) as exit_:
        bench.main(["--png", str(tmp_path / "times.png")])
    assert exit_.value.code == 2
    assert "argument --png: needs matplotlib, which is not installed: pip install matplotlib" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_measured_and_the_status_is_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--json", str(tmp_path / "times.json")]) == 2
    assert capsys.readouterr().err.startswith("the benchmark needs a GPU")
    assert list(tmp_path.iterdir()) == []


def test_the_shapes_that_options_name() -> None:
    assert bench._parse([]).shapes == [Shape(rows, 7, 163840, 256) for rows in (1, 16, 64)]
    named = bench._parse(["--rows", "3", "5", "--steps", "2", "--vocab", "99", "--rank", "32"]).shapes
    assert named == [Shape(3, 2, 99, 32), Shape(5, 2, 99, 32)]
    every = bench._parse(["--all"]).shapes
    assert len(set(every)) == 20
    assert {(shape.vocab, shape.steps) for shape in every} == {(163840, 7), (151936, 7), (129280, 5), (32000, 7), (20480, 7)}


# ---- Inputs and the model of the floor -------------------------------------------------------------------------------------------------------


def test_peaked_logits_are_peaked() -> None:
    likeliest = []
    for peaked in (False, True):
        args = bench.inputs(2, 3, 20000, 16, "cpu", peaked=peaked)
        likeliest.append((args["base_logits"].float() / args["temperature"][0]).softmax(-1).amax(-1))
    assert (likeliest[1] > 0.5).all()
    assert likeliest[0].median() < 0.5


def test_the_floor_by_hand() -> None:
    # A step of 100,000 entries at rank 256 moves 51.2 MB of weights and, of 25 rows, 5 MB of logits and 5 MB of cache.
    shape = Shape(rows=25, steps=3, vocab=100_000, rank=256)
    assert bench.bytes_of_step(shape) == (51_200_000, 10_000_000)
    by_cache = 61.2 / 5.6  # microseconds for megabytes at terabytes a second; memory delivers 16.2 of the 61.2, in less time
    assert bench.floor(shape, cold=False) == pytest.approx(3 * by_cache)
    assert bench.floor(shape, cold=True) == pytest.approx(61.2 / 4.24 + 2 * by_cache)
    # With 400 rows memory is slower: 6.2 MB of weights that the cache has not kept, and 160 MB.
    assert bench.floor(shape._replace(rows=400), cold=False) == pytest.approx(3 * 166.2 / 4.24)


# ---- What is made of the measurements --------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Line]]:
    """`measure` of a small shape with the reference for kernels and a clock that says 100 for any block, 60 for the lm_head alone."""
    baselines = bench._baselines()

    def run(blocks: dict[str, Callable[[], object]]) -> dict[str, float]:
        for name, block in blocks.items():
            if name != "compiled":
                block()
        return dict.fromkeys(blocks, 100.0) | ({"lm_head": 60.0} if "lm_head" in blocks else {})

    def reference(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor, *slots: Tensor) -> Tensor:
        temperature, seeds, positions, rows, cache = slots
        names = {"temperature": temperature, "seeds": seeds, "sample_pos": positions, "idx_mapping": rows, "draft_logits": cache}
        return markov_sample_sequential(base, anchors, w1, w2, **names)

    monkeypatch.setattr(bench, "inputs", functools.partial(bench.inputs, device="cpu"))
    monkeypatch.setattr(bench.guards, "block_device_reason", lambda device: None)
    monkeypatch.setattr(bench, "markov_sample_sequential", lambda plan, **args: markov_sample_sequential(**args))
    monkeypatch.setattr(bench, "_replay_times", run)
    monkeypatch.setattr(bench, "_times", lambda runs, blocks: dict.fromkeys(runs, 900.0))
    monkeypatch.setattr(baselines, "two_launches", reference)
    monkeypatch.setattr(baselines, "vllm_reason", lambda: "it is not wanted here")
    return functools.partial(bench.measure, Shape(2, 3, 500, 16))


def test_the_lines_of_a_shape(on_cpu: Callable[..., list[Line]]) -> None:
    (only,) = on_cpu()
    warm, cold, both = on_cpu(peaked=True, lm_head=torch.zeros(50, 8, dtype=torch.bfloat16))
    assert {**only, "logits": "peaked"} == warm
    assert [line["L2"] for line in (warm, cold, both)] == ["warm", "cold", "sum"]
    for line, time in ((warm, 100.0), (cold, 40.0), (both, 100.0)):
        assert [line[name] for name in ("block", "step", "two launches", "plain", "compiled")] == [time] * 5
        assert (line["tokens agree"], line["caches agree"]) == (True, True)
        assert set(line) <= set(bench_report.COLUMNS)
    assert warm["plain, eager"] == 900.0
    assert cold["lm_head"] == both["lm_head"] == 60.0
    assert warm["two launches / best"] == 1.0
    assert cold["best / floor"] == pytest.approx(40 / bench.floor(Shape(2, 3, 500, 16), cold=True))
    assert both["floor"] is None


@pytest.mark.parametrize("wrong", ["tokens", "caches"])
def test_a_plan_that_disagrees_is_told(wrong: str, on_cpu: Callable[..., list[Line]], monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(plan: str, **args: Tensor) -> Tensor:
        tokens = markov_sample_sequential(**args)
        if plan == "step" and wrong == "tokens":
            tokens[1, 2] += 1
        elif plan == "step":
            args["draft_logits"][1, 2, 3] += 1
        return tokens

    monkeypatch.setattr(bench, "markov_sample_sequential", sample)
    (line,) = on_cpu()
    assert line["tokens agree"] is (wrong != "tokens")
    assert line["caches agree"] is (wrong != "caches")


def test_a_disagreement_and_a_failure_leave_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(shape: Shape, **_: object) -> list[Line]:
        if shape.rows == 128:
            raise torch.OutOfMemoryError
        return [LINES[shape.rows == 64]]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(bench, "measure", measure)
    times = tmp_path / "times.json"
    assert bench.main(["--rows", "1"]) == 0
    assert "V = 163840, rank 256, K = 7\n" in capsys.readouterr().out
    assert bench.main(["--rows", "1", "64", "--json", str(times)]) == 1
    assert json.loads(times.read_text())["results"] == LINES[:2]
    times.unlink()
    with pytest.raises(torch.OutOfMemoryError):
        bench.main(["--rows", "64", "128", "--json", str(times)])
    assert json.loads(times.read_text())["results"] == LINES[1:2]


def test_vllm_of_another_release_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    baselines = bench._baselines()
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert baselines.vllm_reason().startswith("vLLM's sampler cannot be imported (")
    monkeypatch.setattr(baselines, "_vllm_sampler", lambda: lambda logits, is_drafting: None)
    assert baselines.vllm_reason() == "its sampler takes other arguments than that of release 0.33"
    monkeypatch.setattr(baselines, "_vllm_sampler", lambda: lambda logits, is_drafting, logits_cache: None)
    assert baselines.vllm_reason() is None


# ---- What is shown and written ---------------------------------------------------------------------------------------------------------------


def test_the_table_has_the_figures_that_are_there() -> None:
    assert bench_report.table(LINES) == [
        ["R", "L2", "lm_head", "block", "plain", "best / floor", "floor", "agree"],
        ["1", "warm", "-", "112.3", "454.0", "1.06", "105.7", "yes"],
        ["64", "warm", "-", "365.0", "29056.0", "2.32", "157.3", "NOT caches"],
        ["1", "sum", "520.0", "640.0", "454.0", "-", "-", "yes"],
    ]


def test_without_a_terminal_plain_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with bench_report.progress(2) as begin:
        begin("one")
        begin("other")
    bench_report.show("a title", LINES[:1])
    printed = capsys.readouterr()
    assert printed.err == "[1/2] one ...\n[2/2] other ...\n"
    assert printed.out.splitlines() == [
        "a title",
        "R    L2  block  plain  best / floor  floor  agree",
        "1  warm  112.3  454.0          1.06  105.7    yes",
    ]


def test_rich_draws_the_same_cells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rich = pytest.importorskip("rich")
    monkeypatch.setattr(bench_report, "_by_rich", lambda: True)
    rich.reconfigure(width=200)
    with bench_report.progress(1) as begin:
        begin("one")
        bench_report.show("a title", LINES)
    drawn = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"a title", *(" ".join(row) for row in bench_report.table(LINES)[1:])} <= set(drawn)


def test_a_terminal_without_rich_gets_plain_lines_and_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich", None)
    with bench_report.progress(1) as begin:
        begin("one")
    bench_report.show("a title", LINES)
    printed = capsys.readouterr()
    assert printed.err == "for a bar and drawn tables: pip install rich\n[1/1] one ...\n"
    assert printed.out.startswith("a title\n R ")


def test_json_and_csv_hold_the_figures(tmp_path: Path) -> None:
    json_file, csv_file = tmp_path / "times.json", tmp_path / "times.csv"
    bench_report.write(ABOUT, LINES, json_file=json_file, csv_file=csv_file)
    assert json.loads(json_file.read_text()) == {**ABOUT, "results": LINES}
    with csv_file.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["block"] for row in rows] == ["112.26", "365.0", "640.0"]
    assert [row["floor"] for row in rows] == ["105.7", "157.3", ""]
    assert tuple(rows[0]) == bench_report.COLUMNS


def test_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel for each state, with a curve for each candidate and a dashed one for the floor."""
    figures = pytest.importorskip("matplotlib.figure")
    drawn = []

    class Figure(figures.Figure):
        def savefig(self, *args: object, **options: object) -> None:
            drawn.append(self)
            super().savefig(*args, **options)

    monkeypatch.setattr(figures, "Figure", Figure)
    bench_report.write(ABOUT, LINES[::-1], png_file=tmp_path / "times")
    assert (tmp_path / "times").read_bytes().startswith(b"\x89PNG")
    both, warm = drawn[0].axes
    assert {curve.get_label(): curve.get_linestyle() for curve in warm.lines} == {"block": "-", "plain": "-", "floor": "--"}
    assert warm.lines[0].get_xydata().tolist() == [[1, 112.26], [64, 365.0]]
    assert (warm.get_xscale(), warm.get_yscale()) == ("log", "log")
    assert [curve.get_label() for curve in both.lines] == ["block", "plain"]


# ---- On a GPU --------------------------------------------------------------------------------------------------------------------------------


class TestOnGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("logits", ["random", "peaked"])
    def test_a_small_shape_end_to_end(self, logits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench, "LM_HEAD", (4096, 64))
        times = tmp_path / "times.json"
        options = ["--rows", "1", "--steps", "2", "--vocab", "2048", "--rank", "64", "--logits", logits, "--cold", "--json", str(times)]
        assert bench.main(options) == 0
        results = json.loads(times.read_text())["results"]
        assert [line["L2"] for line in results] == ["warm", "cold", "sum"]
        assert all(line["tokens agree"] and line["caches agree"] for line in results)
        assert all(line[name] > 0 for line in results[::2] for name in ("step", "two launches", "compiled", "plain"))
