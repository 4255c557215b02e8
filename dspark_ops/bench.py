"""`python -m dspark_ops.bench`: microseconds for a block of K steps, beside the loops it replaces.

Protocol: random inputs (temperature 0.8), every candidate captured in a CUDA graph of 8 blocks; the candidates' graphs are replayed in turn
(A B C A B C ...), 30 rounds, and the median is reported; back to back, so with what the L2 cache keeps of the block before. The tokens of the
fused plans and of the two-launch baseline are compared in the same run; a plan that the GPU does not serve is left out. The fallback is timed
eagerly against the plain torch loop, as both run where it serves. Baselines live in `tests/baselines.py`, so this runs from a source checkout,
on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from . import guards, markov_sample_sequential

BLOCKS = 8
ROUNDS = 30


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


def inputs(rows: int, steps: int, vocab: int, rank: int, device: str = "cuda") -> dict[str, Tensor]:
    """Random arguments of a sampled block with a cache, one slot a row, in bf16."""
    generator = torch.Generator(device).manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    return {
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


def measure(rows: int, steps: int, vocab: int, rank: int) -> dict[str, float | int | bool]:
    """One line of the table: microseconds a block of each candidate, and whether the tokens agree."""
    baselines = _baselines()
    args = inputs(rows, steps, vocab, rank)
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

    compiled = torch.compile(plain, fullgraph=True)
    agree = all(torch.equal(run(), two_launches()) for run in fused.values())
    graphs = {name: _graph(f) for name, f in (fused | {"two launches": two_launches, "plain": plain, "compiled": compiled}).items()}
    result: dict[str, float | int | bool] = {"R": rows, "K": steps, "V": vocab, "rank": rank, "tokens agree": agree}
    result |= _times({name: graph.replay for name, graph in graphs.items()}, BLOCKS)
    del graphs
    for f in (fallback, plain):
        f()
    result |= _times({"fallback, eager": fallback, "plain, eager": plain}, 1)
    return result


def main(argv: list[str] | None = None) -> int:
    """Prints the table; exit status 1 where tokens disagree."""
    parser = argparse.ArgumentParser(prog="python -m dspark_ops.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], metavar="R")
    parser.add_argument("--steps", type=int, default=7, metavar="K")
    parser.add_argument("--vocab", type=int, default=163840, metavar="V")
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("the benchmark needs a GPU that torch can use; torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA-graph replay, warm L2, microseconds a block")
    print(f"V = {options.vocab}, rank {options.rank}, K = {options.steps}, bf16, temperature 0.8")
    columns = ("block", "step", "two launches", "compiled", "plain", "fallback, eager", "plain, eager")
    print("  R " + "".join(f"{name:>17}" for name in columns) + "   two launches / best   tokens agree")
    results = []
    for rows in options.rows:
        result = measure(rows, options.steps, options.vocab, options.rank)
        results.append(result)
        cells = "".join(f"{result[name]:17.1f}" if name in result else f"{'-':>17}" for name in columns)
        best = min(result[name] for name in ("block", "step") if name in result)
        print(f"{rows:3d} {cells}   {result['two launches'] / best:19.2f}   {result['tokens agree']}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}, indent=1))
    return 0 if all(result["tokens agree"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
