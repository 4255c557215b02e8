"""A drafter as an exported program: saved to a file, loaded, run for any R, and the proof that it drafts what eager code drafts.

The drafter is hidden states [R, K, d] -> lm_head -> dspark_ops.markov_sample_sequential, with random weights. R requests, K draft steps,
V vocabulary, r Markov rank, d hidden size, S request slots. The program keeps the op as one node, which chooses between the kernels and plain
torch when it runs, so a program that was exported on a CPU is served by the kernels on a GPU. A process that loads it must import dspark_ops,
which defines the op. An AOTInductor package is compiled code: it needs no dspark_ops, and its choice is made for the device it was built on.

Where a call writes the draft logits:

| run as                       | the cache                                                                                          |
|------------------------------|----------------------------------------------------------------------------------------------------|
| eager                        | the drafter's buffer `draft_logits`                                                                |
| exported program             | the same buffer, which `program.module()` shares; a program that was loaded has one of its own     |
| after `run_decompositions()` | as before; the op is inside a node `auto_functionalized_v2`                                        |
| AOTInductor package          | a tensor given to `load_constants(..., user_managed=True)`; without it, memory that nothing reads  |

Exit status: 0 where everything agrees, 1 where something does not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim, ExportedProgram

import dspark_ops

V, RANK, WIDTH, K, SLOTS = 1000, 32, 64, 4, 24
BATCHES = (1, 2, 7, 16)


class Batch(NamedTuple):
    """The arguments of a drafter. Without temperature, seeds and positions every row is greedy."""

    hidden: Tensor  # [R, K, d]
    anchor_ids: Tensor  # [R] int64, the token before each block
    slots: Tensor  # [R] int64, the request slot of each row
    sample_pos: Tensor | None  # [R, K] int64
    temperature: Tensor | None  # [S] fp32, 0 is greedy
    seeds: Tensor | None  # [S] int64


class Drafter(torch.nn.Module):
    """The last part of a DSpark drafter; `cached` keeps the logits that it samples from, for verification."""

    draft_logits: Tensor | None  # [S, K, V]

    def __init__(self, dtype: torch.dtype, device: str, *, cached: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, width in (("lm_head", WIDTH), ("markov_w1", RANK), ("markov_w2", RANK)):
            # Multiples of 1/8, whose products and sums are exact in FP32: then every order of summation gives the same bits.
            weight = torch.randint(-8, 9, (V, width), generator=generator) / 8
            self.register_parameter(name, torch.nn.Parameter(weight.to(device, dtype), requires_grad=False))
        self.register_buffer("draft_logits", dspark_ops.new_draft_logits(SLOTS, K, V, dtype=dtype, device=device) if cached else None)

    def forward(
        self,
        hidden: Tensor,
        anchor_ids: Tensor,
        slots: Tensor,
        sample_pos: Tensor | None,
        temperature: Tensor | None,
        seeds: Tensor | None,
    ) -> Tensor:
        """Draft tokens, [R, K] int64."""
        return dspark_ops.markov_sample_sequential(
            F.linear(hidden, self.lm_head),
            anchor_ids,
            self.markov_w1,
            self.markov_w2,
            temperature=temperature,
            seeds=seeds,
            sample_pos=sample_pos,
            idx_mapping=slots,
            draft_logits=self.draft_logits,
        )


def make_batch(num_requests: int, dtype: torch.dtype, device: str, *, sampled: bool = True) -> Batch:
    """Random requests in slots of their own, in no order; with `sampled`, greedy ones among them."""
    generator = torch.Generator().manual_seed(num_requests)
    batch = Batch(
        hidden=(torch.randint(-8, 9, (num_requests, K, WIDTH), generator=generator) / 8).to(dtype),
        anchor_ids=torch.randint(V, (num_requests,), generator=generator),
        slots=torch.randperm(SLOTS, generator=generator)[:num_requests],
        sample_pos=torch.randint(1, 1000, (num_requests, 1), generator=generator) + torch.arange(K) if sampled else None,
        temperature=torch.tensor([0.7, 0.0, 1.0]).repeat(SLOTS // 3) if sampled else None,
        seeds=torch.randint(-(2**63), 2**63 - 1, (SLOTS,), generator=generator) if sampled else None,
    )
    return Batch(*(None if x is None else x.to(device) for x in batch))


def export(drafter: Drafter, batch: Batch, *, strict: bool = False) -> ExportedProgram:
    """Exports a drafter for any R from 1 on. R of the batch must be at least 2: a size of 1 would be taken for a constant."""
    requests = {0: Dim("R", min=1)}
    per_slot = ("temperature", "seeds")
    shapes = tuple(None if x is None or name in per_slot else requests for name, x in batch._asdict().items())
    return torch.export.export(drafter, tuple(batch), dynamic_shapes=shapes, strict=strict)


class Way(NamedTuple):
    """A way to run a drafter, and the cache that it writes."""

    name: str
    call: Callable[..., Tensor]
    cache: Tensor

    def draft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Tokens and cache of a call on an empty cache, so that nothing of an earlier one can pass for its result."""
        self.cache.fill_(-torch.inf)
        tokens = self.call(*batch)
        return tokens.clone(), self.cache.clone()


def of_program(name: str, program: ExportedProgram) -> Way:
    module = program.module()
    return Way(name, module, module.get_buffer("draft_logits"))


def of_package(program: ExportedProgram, path: Path) -> Way:
    """Compiles a program to an AOTInductor package in a file, and loads it."""
    package = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=str(path)))
    cache = program.state_dict["draft_logits"].clone()
    package.load_constants({"draft_logits": cache}, check_full_update=False, user_managed=True)
    return Way("AOTInductor package", package, cache)


def main(arguments: list[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aoti", action="store_true", help="build an AOTInductor package too, which takes a C++ compiler and a while")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    dtype = torch.bfloat16
    drafter = Drafter(dtype, options.device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "drafter.pt2"
        torch.export.save(export(drafter, make_batch(4, dtype, options.device)), file)
        program = torch.export.load(file)
        print(f"torch {torch.__version__}, {options.device}: exported, {file.stat().st_size / 1e6:.2f} MB, loaded")
        ways = [of_program("exported program", program), of_program("after run_decompositions", program.run_decompositions())]
        if options.aoti:
            ways.append(of_package(program, Path(folder) / "package.pt2"))
    eager = Way("eager", drafter, drafter.get_buffer("draft_logits"))
    disagreements = 0
    for num_requests in BATCHES:
        batch = make_batch(num_requests, dtype, options.device)
        tokens, cache = eager.draft(batch)
        for way in ways:
            others, written = way.draft(batch)
            agree = torch.equal(others, tokens) and torch.equal(written.view(torch.int16), cache.view(torch.int16))
            print(f"R = {num_requests:2}: {way.name} {'agrees' if agree else 'DISAGREES'} with eager")
            disagreements += not agree
    return int(disagreements > 0)


if __name__ == "__main__":
    sys.exit(main())
