"""A sequential Markov loop as people write it, compiled by Inductor without and with the loop-fusing pass of dspark_ops.inductor.

The weights lie on a grid where every sum of products is exact, so that eager code and the fused op must draw the same tokens. Exit status: 0 where
they do, 1 where they do not or where the pass found no loop to fuse.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils.benchmark import Timer

from dspark_ops.inductor import compile_options

# V, rank, R and K.
SIZES = {"cuda": (151936, 256, 16, 7), "cpu": (2048, 64, 4, 3)}
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


def compiled(args: tuple[Tensor, ...], options: dict[str, object] | None) -> tuple[Tensor, int, Callable[..., object]]:
    """Tokens, launches in the generated program, and the compiled function."""
    torch._dynamo.reset()
    function = torch.compile(sample_block_tokens, fullgraph=True, options=options)
    with torch._inductor.config.patch(force_disable_caches=True):
        (tokens, _), (code,) = run_and_get_code(function, *args)
    body = code[code.index("def call(") :]
    return tokens, len(LAUNCHES.findall(body)), function


def milliseconds(function: Callable[..., object], args: tuple[Tensor, ...]) -> float:
    return Timer("function(*args)", globals={"function": function, "args": args}).blocked_autorange(min_run_time=0.5).median * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    vocab, rank, rows, steps = SIZES[device]
    torch.manual_seed(0)
    # cuBLAS may otherwise round the parts of a split sum to 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    base, w1, w2 = (on_grid(*shape, device=device) for shape in ((rows, steps, vocab), (vocab, rank), (vocab, rank)))
    args = (base, torch.randint(vocab, (rows,), device=device), w1, w2)

    eager, _ = sample_block_tokens(*args)
    print(f"{device}: R = {rows}, K = {steps}, V = {vocab}, rank {rank}, bf16; torch {torch.__version__}")
    print(f"{'':12}  {'launches':>8}  {'ms a block':>10}  tokens unlike eager code")
    times, differing = [], 0
    for name, options in (("Inductor", None), ("with the pass", compile_options())):
        tokens, launches, function = compiled(args, options)
        differing = int((tokens != eager).sum())
        times.append(milliseconds(function, args))
        print(f"{name:13} {launches:9}  {times[-1]:10.3f}  {differing} of {eager.numel()}")
    print(f"{times[0] / times[1]:.2f} times as fast")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
