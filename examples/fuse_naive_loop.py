"""A sequential Markov loop as people write it, compiled by Inductor without and with the loop-fusing pass of dspark_ops.inductor.

The weights lie on a grid where every sum of products is exact, so that eager code and the fused op must draw the same tokens, bit for bit
the same logits. Exit status: 0 where they do, 1 where they do not or where the pass fused no loop.

The fused op gains time on a GPU, where kernels serve it. On a CPU it runs plain torch operations and the example shows equality alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils.benchmark import Timer

from dspark_ops.inductor import compile_options
from dspark_ops.inductor.fuse_loop import record

# R, K, V and rank.
SIZES = {"cuda": (16, 7, 151936, 256), "cpu": (4, 3, 2048, 64)}
# What launches something in a generated program: kernels of Triton and C++, library products, opaque ops.
LAUNCHES = re.compile(r"\w+\.run\(|\bcpp_fused\w*\(|extern_kernels\.\w+\(|torch\.ops\.\w+\.\w+")


def sample_block_tokens(base_logits: Tensor, anchor_ids: Tensor, markov_w1: Tensor, markov_w2: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy draft tokens [R, K] and the corrected logits [R, K, V], in the manner of DeepSpec."""
    tokens, corrected, previous = [], [], anchor_ids
    for step in range(base_logits.shape[1]):
        bias = F.linear(F.embedding(previous.unsqueeze(1), markov_w1), markov_w2)
        corrected.append(base_logits[:, step : step + 1] + bias)
        previous = corrected[-1].argmax(dim=-1).squeeze(1)
        tokens.append(previous)
    return torch.stack(tokens, dim=1), torch.cat(corrected, dim=1)


def on_grid(*shape: int, device: str) -> Tensor:
    return (torch.randint(-8, 9, shape) / 8).to(device, torch.bfloat16)


def compiled(args: tuple[Tensor, ...], options: dict[str, object] | None) -> tuple[Callable[..., tuple[Tensor, Tensor]], int, int]:
    """The compiled function, the loops that were fused in it, and the launches of the generated program."""
    torch._dynamo.reset()
    function = torch.compile(sample_block_tokens, fullgraph=True, options=options)
    # The pass does not run on a graph from a cache.
    uncached = torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False)
    with record() as found, uncached[0], uncached[1]:
        _, (code,) = run_and_get_code(function, *args)
    return function, sum(loop.fused for loop in found), len(LAUNCHES.findall(code[code.index("def call(") :]))


def milliseconds(function: Callable[..., object], args: tuple[Tensor, ...]) -> float:
    return Timer("function(*args)", globals={"function": function, "args": args}).blocked_autorange(min_run_time=0.5).median * 1e3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    for name, what in (("rows", "R"), ("steps", "K"), ("vocab", "V"), ("rank", "Markov rank")):
        parser.add_argument(f"--{name}", type=int, help=f"{what}; default: one that suits the device")
    given = vars(parser.parse_args(argv))
    device = given.pop("device")
    rows, steps, vocab, rank = (default if size is None else size for size, default in zip(given.values(), SIZES[device], strict=True))
    torch.manual_seed(0)
    # cuBLAS may otherwise round the parts of a split sum to 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    base, w1, w2 = (on_grid(*shape, device=device) for shape in ((rows, steps, vocab), (vocab, rank), (vocab, rank)))
    args = (base, torch.randint(vocab, (rows,), device=device), w1, w2)

    expected = sample_block_tokens(*args)
    print(f"{device}: R = {rows}, K = {steps}, V = {vocab}, rank {rank}, bf16; torch {torch.__version__}")
    print(f"{'':13}  fused loops  launches  ms a block  tokens unlike eager code")
    times, problems = [], []
    for name, options in (("Inductor", None), ("with the pass", compile_options())):
        function, loops, launches = compiled(args, options)
        tokens, logits = function(*args)
        differing = int((tokens != expected[0]).sum())
        times.append(milliseconds(function, args))
        print(f"{name:13}  {loops:11}  {launches:8}  {times[-1]:10.3f}  {differing} of {tokens.numel()}")
        if options is not None and not loops:
            problems.append("the pass fused no loop")
        if differing or not torch.equal(logits, expected[1]):
            problems.append(f"{name}: tokens or logits are not those of eager code")
    print(f"the pass makes a block {times[0] / times[1]:.2f} times as fast")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
