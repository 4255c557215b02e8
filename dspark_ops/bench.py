"""`python -m dspark_ops.bench`: microseconds for a block of K steps, beside the loops it replaces.

Protocol: random inputs (bf16, temperature 0.8), every candidate captured in a CUDA graph of 8 blocks; the candidates' graphs are replayed in
turn (A B C A B C ...), 30 rounds, and the median is reported; back to back, so with what the L2 cache keeps of the block before. With `--cold`
a product of the size of an lm_head, which reads 2.3 GB of weights, comes before every block of the graphs; graphs of the product alone are
replayed in the same turns, and both the difference and the sum are reported, since the sum is what a drafter feels. In the same run the
tokens of the fused plans and of the two-launch baseline are compared, and the caches of the plans bit for bit; a plan that the GPU does not
serve is left out, and so is vLLM's loop where vLLM is missing. The fallback is timed eagerly against the plain torch loop, as both run where
it serves. Baselines live in `tests/baselines.py`, so this runs from a source checkout, on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import os
import statistics
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from . import bench_report, guards, markov_sample_sequential
from .bench_report import Line

BLOCKS = 8
ROUNDS = 30
LM_HEAD = (163840, 7168)  # V and hidden size of the product that leaves the L2 cache cold

# Ceilings of an H200, as measured: bytes a second read and written in memory, and read from the L2 cache; bytes of weights that it keeps.
MEMORY_RATE, L2_RATE, L2_KEEPS = 4.24e12, 5.6e12, 45e6


class Shape(NamedTuple):
    rows: int  # R
    steps: int  # K
    vocab: int  # V
    rank: int


ALL = [Shape(rows, 7, 163840, 256) for rows in (1, 2, 4, 8, 16, 32, 64, 128)] + [
    Shape(rows, steps, vocab, 256) for vocab, steps in ((151936, 7), (129280, 5), (32000, 7), (20480, 7)) for rows in (1, 16, 64)
]


def bytes_of_step(shape: Shape) -> tuple[int, int]:
    """Bytes that a step must move in bf16: V rank 2 of markov_w2, and R V 2 of base logits read with R V 2 of the cache written.

    A block moves K times their sum; its embeddings, keys and tokens are negligible.

    >>> bytes_of_step(Shape(rows=2, steps=7, vocab=1000, rank=16))
    (32000, 8000)
    """
    return 2 * shape.vocab * shape.rank, 4 * shape.rows * shape.vocab


def floor(shape: Shape, cold: bool) -> float:
    """Microseconds that moving a block's bytes takes by the ceilings of an H200.

    A model, no bound: all bytes of a step pass the L2 cache at its rate, while memory delivers, at its own, those that the cache has not
    kept; the slower of the two takes the step's time, and steps follow one another. What the cache keeps is the first 45 MB of markov_w2,
    from the step or block before; in the first step of a cold block nothing. A kernel that holds weights in registers moves fewer bytes.

    >>> round(floor(Shape(rows=1, steps=7, vocab=163840, rank=256), cold=False), 1)
    105.7
    """
    weights, logits = bytes_of_step(shape)

    def step(kept: float) -> float:
        return max((weights + logits) / L2_RATE, (weights - kept + logits) / MEMORY_RATE) * 1e6

    kept = min(weights, L2_KEEPS)
    return step(0 if cold else kept) + (shape.steps - 1) * step(kept)


@functools.cache  # a module loaded anew would compile its kernels anew
def _baselines() -> types.ModuleType:
    path = Path(__file__).resolve().parent.parent / "tests" / "baselines.py"
    spec = importlib.util.spec_from_file_location("dspark_ops_baselines", path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(f"the baselines ({path}) come with the source checkout only: run the benchmark there")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def inputs(rows: int, steps: int, vocab: int, rank: int, device: str = "cuda", *, peaked: bool = False) -> dict[str, Tensor]:
    """Random arguments of a sampled block with a cache, one slot a row, in bf16.

    Base logits are normal with a deviation of 3; `peaked` ones have four tokens a row and step that stand out, one by 30 and the
    others by 14 to 18, as where a drafter is sure.
    """
    generator = torch.Generator(device).manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    args = {
        "base_logits": 3 * normal(rows, steps, vocab),
        "anchor_ids": torch.randint(vocab, (rows,), generator=generator, device=device),
        "markov_w1": normal(vocab, rank),
        "markov_w2": normal(vocab, rank) * rank**-0.5,
        "temperature": torch.full((rows,), 0.8, device=device),
        "seeds": torch.arange(rows, device=device) + 1234,
        "sample_pos": torch.arange(100, 100 + steps, device=device).repeat(rows, 1),
        "idx_mapping": torch.arange(rows, device=device),
        "draft_logits": torch.zeros(rows, steps, vocab, device=device, dtype=torch.bfloat16),
    }
    if peaked:
        peaks = torch.tensor([30.0, 18.0, 16.0, 14.0], device=device, dtype=torch.bfloat16).expand(rows, steps, 4)
        args["base_logits"].scatter_add_(2, torch.randint(vocab, (rows, steps, 4), generator=generator, device=device), peaks)
    return args


def _graph(block: Callable[[], object]) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        block()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(BLOCKS):
            block()
    return graph


def _times(runs: dict[str, Callable[[], object]], blocks: int) -> dict[str, float]:
    """Median microseconds a block of each candidate, measured in turn."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 2):
        for name, run in runs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1000 / blocks)
    return {name: statistics.median(times[2:]) for name, times in samples.items()}


def _replay_times(blocks: dict[str, Callable[[], object]]) -> dict[str, float]:
    graphs = {name: _graph(block) for name, block in blocks.items()}
    return _times({name: graph.replay for name, graph in graphs.items()}, BLOCKS)


def _after(first: Callable[[], object], block: Callable[[], object]) -> Callable[[], object]:
    return lambda: (first(), block())


def measure(shape: Shape, *, peaked: bool = False, lm_head: Tensor | None = None) -> list[Line]:
    """The lines of a shape: microseconds a block of each candidate by the state of the L2 cache, and whether tokens and caches agree.

    The states are "warm" and, with the weights of an lm_head [V, d] in bf16, "cold" and "sum", that of the cold block and the product.
    """
    torch._dynamo.reset()  # it compiles a function for eight shapes only
    baselines = _baselines()
    args = inputs(*shape, peaked=peaked)
    base, anchors, w1, w2 = (args[name] for name in ("base_logits", "anchor_ids", "markov_w1", "markov_w2"))
    temperature, seeds, positions, slots = (args[name] for name in ("temperature", "seeds", "sample_pos", "idx_mapping"))
    cache = args["draft_logits"]

    def by(plan: str) -> Callable[[], Tensor]:
        return lambda: markov_sample_sequential(**args, plan=plan)  # type: ignore[arg-type]  # a dict of tensors only

    fused = {plan: by(plan) for plan in ("block", "step") if plan == "step" or guards.block_device_reason(base.device) is None}
    fallback = by("reference")

    def two_launches() -> Tensor:
        return baselines.two_launches(base, anchors, w1, w2, temperature, seeds, positions, slots, cache)

    def plain() -> Tensor:
        return baselines.plain_loop(base, anchors, w1, w2, temperature, slots, cache)

    blocks: dict[str, Callable[[], object]] = {
        **fused,
        "two launches": two_launches,
        "plain": plain,
        "compiled": torch.compile(plain, fullgraph=True, dynamic=False),
    }
    if baselines.vllm_reason() is None:
        blocks["vLLM loop"] = baselines.vllm_loop(*args.values())

    found = []
    for filling, run in enumerate(fused.values()):
        cache.fill_(filling)  # another one for each plan, so that what is not written differs
        found.append((run().clone(), cache.clone()))
    tokens_agree = all(torch.equal(tokens, two_launches()) for tokens, _ in found)
    caches_agree = all(torch.equal(written.view(torch.int16), found[0][1].view(torch.int16)) for _, written in found)
    del found

    def line(state: str, times: dict[str, float]) -> Line:
        best = min(times[plan] for plan in fused)
        least = None if state == "sum" else floor(shape, cold=state == "cold")
        return {
            "V": shape.vocab,
            "K": shape.steps,
            "rank": shape.rank,
            "logits": "peaked" if peaked else "random",
            "R": shape.rows,
            "L2": state,
            **times,
            "two launches / best": times["two launches"] / best,
            "best / floor": None if least is None else best / least,
            "MB": shape.steps * sum(bytes_of_step(shape)) / 1e6,
            "floor": least,
            "tokens agree": tokens_agree,
            "caches agree": caches_agree,
        }

    warm = _replay_times(blocks)
    for f in (fallback, plain):
        f()
    lines = [line("warm", warm | _times({"fallback, eager": fallback, "plain, eager": plain}, 1))]
    if lm_head is not None:
        hidden = torch.randn(shape.rows * shape.steps, lm_head.shape[1], device=base.device, dtype=lm_head.dtype)
        product = torch.empty(hidden.shape[0], lm_head.shape[0], device=base.device, dtype=lm_head.dtype)
        read_weights = functools.partial(torch.mm, hidden, lm_head.t(), out=product)
        sums = _replay_times({"lm_head": read_weights} | {name: _after(read_weights, block) for name, block in blocks.items()})
        alone = {"lm_head": sums.pop("lm_head")}
        lines.append(line("cold", alone | {name: time - alone["lm_head"] for name, time in sums.items()}))
        lines.append(line("sum", alone | sums))
    return lines


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _rank(text: str) -> int:
    if (rank := int(text)) not in (16, 32, 64, 128, 256, 512):
        raise argparse.ArgumentTypeError(f"must be a power of two from 16 to 512, which all candidates serve, got {rank}")
    return rank


def _file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a directory that exists, got {text}: make {path.parent} first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got the directory {text}: name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be a file that can be written, got {text}: change its permissions or name another")
    return path


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """The options, with the shapes they name as `shapes`; the files are known to be writable."""
    parser = argparse.ArgumentParser(
        prog="python -m dspark_ops.bench",
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python -m dspark_ops.bench --all --cold --csv times.csv --png times.png",
    )
    parser.add_argument("--rows", type=_positive, nargs="+", metavar="R", help="requests (1 16 64)")
    parser.add_argument("--steps", type=_positive, metavar="K", help="draft steps (7)")
    parser.add_argument("--vocab", type=_positive, metavar="V", help="vocabulary (163840)")
    parser.add_argument("--rank", type=_rank, help="Markov rank (256)")
    parser.add_argument("--all", action="store_true", help=f"{len(ALL)} shapes of known drafters, instead of those")
    parser.add_argument("--cold", action="store_true", help="also with a cold L2 cache, after a product that reads 2.3 GB of weights")
    parser.add_argument("--logits", choices=("random", "peaked"), default="random", help="base logits (random)")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write the figures to this file, and what they were measured on")
    parser.add_argument("--csv", type=_file, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--png", type=_file, metavar="FILE", help="plot them to this file; needs matplotlib")
    options = parser.parse_args(argv)
    if options.all and (named := [name for name in ("rows", "steps", "vocab", "rank") if getattr(options, name) is not None]):
        parser.error(f"argument --all: must stand without --{named[0]}, since it names all shapes itself: leave out one of them")
    if options.png is not None and not bench_report.has("matplotlib"):
        parser.error("argument --png: needs matplotlib, which is not installed: pip install matplotlib")
    sizes = options.steps or 7, options.vocab or 163840, options.rank or 256
    options.shapes = ALL if options.all else [Shape(rows, *sizes) for rows in options.rows or (1, 16, 64)]
    return options


def main(argv: list[str] | None = None) -> int:
    """Prints the tables and writes the files; exit status 1 where tokens or caches disagree, 2 where nothing can be measured."""
    options = _parse(argv)
    if not torch.cuda.is_available():
        print("the benchmark needs a GPU that torch can use; torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "unit": "microseconds a block"}
    print(f"{about['device']}, torch {about['torch']}, CUDA-graph replay, {about['unit']}; bf16, temperature 0.8, {options.logits} logits")
    print("floor: a model, with the ceilings of an H200, of moving the MB that a block must")
    if (reason := _baselines().vllm_reason()) is not None:
        print(f"vLLM's loop is left out: {reason}")
    lm_head = torch.randn(LM_HEAD, device="cuda", dtype=torch.bfloat16) if options.cold else None
    lines: list[Line] = []
    try:
        with bench_report.progress(len(options.shapes)) as begin:
            for (steps, vocab, rank), group in itertools.groupby(options.shapes, key=lambda shape: shape[1:]):
                title, done = f"V = {vocab}, rank {rank}, K = {steps}", len(lines)
                for shape in group:
                    begin(f"{title}, R = {shape.rows}")
                    lines += measure(shape, peaked=options.logits == "peaked", lm_head=lm_head)
                bench_report.show(title, lines[done:])
    finally:  # an interrupted run keeps what it has
        if lines:
            bench_report.write(about, lines, json_file=options.json, csv_file=options.csv, png_file=options.png)
    return 0 if all(line["tokens agree"] and line["caches agree"] for line in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
