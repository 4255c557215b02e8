"""A drafter that samples its block with dspark_ops, eager and under torch.compile(fullgraph=True), and the proof that both draft the same.

It reads a drafter's Markov head and lm_head from a safetensors file in DeepSpec's tensor names, or writes a small random one. Then, for
batches of R = 1, 2, 7, 16 and 64 requests, it runs the drafter's last part: hidden states [R, K, d] -> lm_head -> sequential Markov sampling.
The hidden states are random: the layers that make them are not the matter here. R requests, K draft steps, V vocabulary, r Markov rank,
d hidden size, S request slots.

Exit status: 0 where everything agrees, 1 where something does not, 2 for a file or an option that cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch._dynamo.utils import counters

import dspark_ops

try:
    from rich.console import Console
    from rich.table import Table
except ImportError:  # plain lines do
    RICH = False
else:
    RICH = sys.stdout.isatty()

W1, W2, LM_HEAD = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "lm_head.weight"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# V, r and d of the file that is written where none is given: on a CPU both modes together take well under a minute.
SIZES = {"cuda": (32000, 128, 256), "cpu": (2048, 64, 128)}
MOST_COMPILATIONS = 2  # one for R = 1, which the compiler always treats apart, and one for every other R


class InputError(Exception):
    """A file or an option that the example cannot work with; the text says which and why."""


# ---- The weights -----------------------------------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    markov_w1: Tensor  # [V, r]
    markov_w2: Tensor  # [V, r]
    lm_head: Tensor  # [V, d]


def read_weights(path: Path, device: torch.device) -> Weights:
    """Reads the three tensors of a DeepSpec drafter; shapes and dtypes are checked on the header, before gigabytes are read."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            entries = {name: file.get_slice(name) for name in list(file.keys())}
            check_header(path, {name: (entry.get_shape(), entry.get_dtype()) for name, entry in entries.items()})
            return Weights(*(file.get_tensor(name) for name in (W1, W2, LM_HEAD)))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read as a safetensors file: {error}") from None


def check_header(path: Path, header: dict[str, tuple[list[int], str]]) -> None:
    """Raises InputError, which names the tensor, where a file is not that of a drafter with a plain Markov head."""
    for name in (W1, W2, LM_HEAD):
        if name not in header:
            near = [other for other in header if "markov" in other or "lm_head" in other]
            raise InputError(f"{name} is missing in {path}, which has {', '.join(near) or 'no Markov head and no lm_head at all'}")
        shape, dtype = header[name]
        if len(shape) != 2 or 0 in shape:
            raise InputError(f"{name} must be a matrix, got shape {shape} in {path}")
        if dtype not in DTYPES:
            raise InputError(f"{name} must be {' or '.join(DTYPES)}, got {dtype} in {path}")
    for name in header:
        # A gated or recurrent head has the same two matrices and more: without these the drafts would be silently wrong.
        if name.startswith("markov_head.") and name not in (W1, W2):
            raise InputError(f"{name} in {path} belongs to a gated or recurrent Markov head; this example serves the plain one")
    (vocab, rank), dtype = header[W1]
    if header[W2] != ([vocab, rank], dtype):
        w2_shape, w2_dtype = header[W2]
        raise InputError(f"{W2} must be {[vocab, rank]} {dtype}, as {W1} is, got {w2_shape} {w2_dtype} in {path}")
    if header[LM_HEAD][0][0] != vocab:
        raise InputError(f"{LM_HEAD} must have as many rows as {W1}, {vocab}, got shape {header[LM_HEAD][0]} in {path}")


def on_grid(*shape: int, generator: torch.Generator) -> Tensor:
    """Random multiples of 1/8 from -1 to 1. Products of two and their sums are exact in FP32, in whatever order a library adds them."""
    return torch.randint(-8, 9, shape, generator=generator) / 8


def write_weights(path: Path, sizes: tuple[int, int, int], generator: torch.Generator) -> None:
    vocab, rank, width = sizes
    shapes = {W1: (vocab, rank), W2: (vocab, rank), LM_HEAD: (vocab, width)}
    save_file({name: on_grid(*shape, generator=generator).bfloat16() for name, shape in shapes.items()}, path)


# ---- The drafter -----------------------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """What a call of the drafter gets for its R requests."""

    hidden: Tensor  # [R, K, d] of the K positions
    anchor_ids: Tensor  # [R] int64, the last accepted token
    sample_pos: Tensor  # [R, K] int64, the positions of the tokens to draft
    slots: Tensor  # [R] int64, the request slot of each row


class Drafter(torch.nn.Module):
    """The last part of a DSpark drafter, for up to S requests at a time."""

    temperature: Tensor  # [S] fp32, 0 is greedy
    seeds: Tensor  # [S] int64
    draft_logits: Tensor  # [S, K, V], which verification reads

    def __init__(self, weights: Weights, temperature: Tensor, seeds: Tensor, num_steps: int) -> None:
        super().__init__()
        self.lm_head = torch.nn.Parameter(weights.lm_head, requires_grad=False)
        self.markov_w1 = torch.nn.Parameter(weights.markov_w1, requires_grad=False)
        self.markov_w2 = torch.nn.Parameter(weights.markov_w2, requires_grad=False)
        # What belongs to a request lives in its slot. Buffers keep their address, as CUDA graphs of a call that writes the cache need it.
        self.register_buffer("temperature", temperature, persistent=False)
        self.register_buffer("seeds", seeds, persistent=False)
        vocab, device = weights.lm_head.shape[0], weights.lm_head.device
        cache = dspark_ops.new_draft_logits(len(seeds), num_steps, vocab, dtype=weights.lm_head.dtype, device=device)
        self.register_buffer("draft_logits", cache, persistent=False)

    def sampling(self, hidden: Tensor, anchor_ids: Tensor, sample_pos: Tensor, slots: Tensor) -> dict[str, Any]:
        """The arguments of `markov_sample_sequential`, and of `why_not`."""
        return {
            "base_logits": F.linear(hidden, self.lm_head),  # one product for all K positions; the Markov head does what is sequential
            "anchor_ids": anchor_ids,
            "markov_w1": self.markov_w1,
            "markov_w2": self.markov_w2,
            "temperature": self.temperature,
            "seeds": self.seeds,
            "sample_pos": sample_pos,
            "idx_mapping": slots,
            "draft_logits": self.draft_logits,
        }

    def forward(self, hidden: Tensor, anchor_ids: Tensor, sample_pos: Tensor, slots: Tensor) -> Tensor:
        """Draft tokens, [R, K] int64; the logits they were sampled from go to `draft_logits`."""
        return dspark_ops.markov_sample_sequential(**self.sampling(hidden, anchor_ids, sample_pos, slots))


def compile_drafter(drafter: Drafter) -> Callable[..., Tensor]:
    return torch.compile(drafter, fullgraph=True)


def mark_requests(batch: Batch) -> None:
    """Tells the compiler that R varies, so that the first graph for R >= 2 serves every R >= 2, in whatever order the batches come.

    R = 1 gets a graph of its own, because the compiler takes a size of 1 for a constant: marking it would be an error.
    """
    if len(batch.hidden) > 1:
        for tensor in batch:
            torch._dynamo.mark_dynamic(tensor, 0)


def make_drafter(weights: Weights, num_slots: int, num_steps: int, generator: torch.Generator) -> Drafter:
    """A drafter whose slots have requests of all kinds: greedy, sampled below 1 and sampled at 1, with any 64-bit seed."""
    device = weights.lm_head.device
    temperature = torch.tensor([0.7, 0.0, 1.0]).repeat(num_slots // 3 + 1)[:num_slots]
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_slots,), generator=generator)
    return Drafter(weights, temperature.to(device), seeds.to(device), num_steps)


def make_batch(drafter: Drafter, num_requests: int, generator: torch.Generator) -> Batch:
    """Random requests in slots of their own, in no order."""
    num_slots, num_steps, vocab = drafter.draft_logits.shape
    first_position = torch.randint(1, 1000, (num_requests, 1), generator=generator)
    batch = Batch(
        hidden=on_grid(num_requests, num_steps, drafter.lm_head.shape[1], generator=generator).to(drafter.lm_head.dtype),
        anchor_ids=torch.randint(vocab, (num_requests,), generator=generator),
        sample_pos=first_position + torch.arange(num_steps),
        slots=torch.randperm(num_slots, generator=generator)[:num_requests],
    )
    batch = Batch(*(tensor.to(drafter.lm_head.device) for tensor in batch))
    mark_requests(batch)
    return batch


# ---- Whether eager and compiled agree --------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """What a call leaves behind."""

    tokens: Tensor  # [R, K]
    cache: Tensor  # [S, K, V]


def draft(drafter: Drafter, call: Callable[..., Tensor], batch: Batch) -> Block:
    """Runs a call on an empty cache, so that nothing of an earlier one can pass for its result."""
    drafter.draft_logits.fill_(-torch.inf)
    tokens = call(*batch)
    return Block(tokens.clone(), drafter.draft_logits.clone())


def logit_tolerance(drafter: Drafter, batch: Batch, tokens: Tensor) -> Tensor:
    """How far two correct computations of a logit may be apart, [R, K, V], given the tokens before.

    A sum of n products in FP32 depends on the order by at most n 2^-23 times the sum of their absolute values; that may push each of the three
    roundings (base logit, bias, their sum) to the neighbouring number.
    """
    hidden, lm_head, w2 = batch.hidden.float(), drafter.lm_head.float().t(), drafter.markov_w2.float().t()
    embedding = drafter.markov_w1[torch.cat([batch.anchor_ids[:, None], tokens[:, :-1]], dim=1)].float()
    sums = len(lm_head) * (hidden.abs() @ lm_head.abs()) + len(w2) * (embedding.abs() @ w2.abs())
    base, bias = hidden @ lm_head, embedding @ w2
    return sums * 2.0**-23 + (base.abs() + bias.abs() + (base + bias).abs()) * torch.finfo(drafter.lm_head.dtype).eps


def compare(drafter: Drafter, batch: Batch, eager: Block, compiled: Block, exact: bool) -> tuple[list[str], int]:
    """What disagrees, as texts, and how many rows drew different tokens for a reason that is no fault.

    With `exact` every dot product is the same in any order, so the cached logits must be equal bit for bit. Otherwise they may differ by
    `logit_tolerance`. Tokens must be equal, unless the two keys (logit / temperature + noise) were closer than that tolerance, or in a sampled
    row than 8 units in the last place, which is what two implementations of `log` may differ by. After a first different token a row's
    later steps have another past and are not compared.
    """
    for name, block in (("eager", eager), ("compiled", compiled)):
        if not ((block.tokens >= 0) & (block.tokens < block.cache.shape[2])).all():
            return [f"{name} drew tokens outside the vocabulary"], 0  # which the comparison would index with
    differs = eager.tokens != compiled.tokens
    same_past = differs.cumsum(dim=1) - differs.long() == 0
    logits, others = eager.cache[batch.slots], compiled.cache[batch.slots]
    if exact:
        tolerance = torch.zeros_like(logits, dtype=torch.float32)
        wrong = bits(logits) != bits(others)
    else:
        tolerance = logit_tolerance(drafter, batch, eager.tokens)
        wrong = ~((logits == others) | ((logits.float() - others.float()).abs() <= tolerance))  # so that NaN is wrong
    problems, excused = [], 0
    for row, step in (wrong.any(dim=2) & same_past).nonzero().tolist():
        problems.append(f"row {row}, step {step}: {int(wrong[row, step].sum())} cached logits differ between eager and compiled")
    for row, step in (differs & same_past).nonzero().tolist():
        pair = torch.stack([eager.tokens[row, step], compiled.tokens[row, step]])
        gap, allowed = key_gap(drafter, batch, logits[row, step, pair], tolerance[row, step, pair], pair, row, step)
        if gap < allowed:
            excused += 1
        else:
            problems.append(
                f"row {row}, step {step}: eager drew token {pair[0]} and compiled {pair[1]}, whose keys are {gap:.3g} apart "
                f"(rounding explains less than {allowed:.3g})"
            )
    unused = torch.ones(len(eager.cache), dtype=torch.bool, device=eager.cache.device)
    unused[batch.slots] = False
    for name, block in (("eager", eager), ("compiled", compiled)):
        if not (block.cache[unused] == -torch.inf).all():
            problems.append(f"{name} wrote to a slot of the cache that belongs to no request of the batch")
    return problems, excused


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def key_gap(drafter: Drafter, batch: Batch, logits: Tensor, tolerance: Tensor, pair: Tensor, row: int, step: int) -> tuple[float, float]:
    """How far the keys of two tokens are apart, and what rounding may explain; both [2] for `logits` and `tolerance`."""
    slot = batch.slots[row]
    temperature = drafter.temperature[slot].item()
    if temperature == 0:
        return abs(logits[0].item() - logits[1].item()), tolerance.sum().item()
    noise = dspark_ops.gumbel_noise(drafter.seeds[slot], batch.sample_pos[row, step], pair, step=step)
    keys = logits.float() / temperature + noise
    units = 8 * 2.0**-23 * (keys.abs() + noise.abs()).max().item()
    return abs(keys[0].item() - keys[1].item()), tolerance.sum().item() / temperature + units


# ---- What is printed -------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Shows that something is going on: a spinner in a terminal, a line elsewhere."""
    if RICH:
        with Console().status(text):
            yield
    else:
        print(f"{text} ...", flush=True)
        yield


def show_table(columns: list[str], rows: list[list[str]]) -> None:
    if RICH:
        table = Table()
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(cell) for cell in cells) for cells in zip(columns, *rows, strict=True)]
    for row in [columns, *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def show_set_up(path: Path, written: bool, drafter: Drafter) -> None:
    device = drafter.lm_head.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"device:     {device} ({name})")
    print(f"versions:   python {platform.python_version()}, torch {torch.__version__}, triton {version('triton')}, rich {version('rich')}")
    print(f"weights:    {path}{' (written just now; pass it as FILE to use it again)' if written else ''}")
    (vocab, width), rank = drafter.lm_head.shape, drafter.markov_w1.shape[1]
    num_slots, num_steps, _ = drafter.draft_logits.shape
    print(f"sizes:      V {vocab}, r {rank}, d {width}, K {num_steps}, S {num_slots}, logits in {drafter.lm_head.dtype}")


def show_tokens(drafter: Drafter, batch: Batch, tokens: Tensor) -> None:
    print(f"tokens of the first requests at R = {len(tokens)}:")
    for row, (anchor, slot) in enumerate(zip(batch.anchor_ids.tolist()[:3], batch.slots.tolist(), strict=False)):
        drafted = " ".join(map(str, tokens[row].tolist()))
        print(f"  request {row}, slot {slot}, temperature {drafter.temperature[slot]:.1f}: {anchor} -> {drafted}")


def show_agreement(problems: list[str], excused: int, rows: int, exact: bool) -> None:
    print(f"agreement:  {'NO' if problems else 'yes'}: tokens and cached logits of {rows} rows, eager against compiled")
    if exact:
        print("            weights and hidden states lie on a grid, every dot product is exact: logits are compared bit for bit")
    else:
        print("            sums may be taken in any order: logits may differ by the rounding of that (see logit_tolerance)")
    print(f"            {excused} rows excused, whose two best keys are too close to tell")


def timed_calls(batch: Batch) -> int:
    return 30 if batch.hidden.is_cuda else 7


def milliseconds(call: Callable[..., Tensor], batch: Batch) -> float:
    """Median time of a block, the work of the GPU included."""
    times = []
    for _ in range(timed_calls(batch)):
        start = time.perf_counter()
        call(*batch)
        if batch.hidden.is_cuda:
            torch.cuda.synchronize(batch.hidden.device)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


# ---- The run ---------------------------------------------------------------------------------------------------------------------------------


def count_graph_breaks(drafter: Drafter, batch: Batch) -> int:
    """Graph breaks of the drafter, counted with fullgraph off, which would stop at the first one; leaves the compiler as new."""
    breaks = torch._dynamo.explain(drafter)(*batch).graph_break_count
    torch._dynamo.reset()
    return int(breaks)


def run_batches(drafter: Drafter, batches: list[Batch], exact: bool) -> list[str]:
    """Drafts every batch in both modes, prints what it finds and returns what disagrees."""
    with progress("counting graph breaks"):
        breaks = count_graph_breaks(drafter, batches[0])
    counters.clear()
    compiled_drafter = compile_drafter(drafter)
    problems: list[str] = []
    table: list[list[str]] = []
    all_excused = compilations = 0
    for batch in batches:
        num_requests = len(batch.hidden)
        with progress(f"R = {num_requests}: eager, then compiled (a new graph: some ten seconds)"):
            eager = draft(drafter, drafter, batch)
            start = time.perf_counter()
            compiled = draft(drafter, compiled_drafter, batch)
            first_call = time.perf_counter() - start
            found, excused = compare(drafter, batch, eager, compiled, exact)
            eager_ms, compiled_ms = milliseconds(drafter, batch), milliseconds(compiled_drafter, batch)
        problems += [f"R = {num_requests}, {text}" for text in found]
        all_excused += excused
        new_graphs = counters["stats"]["unique_graphs"] - compilations
        compilations += new_graphs
        times = [f"{eager_ms:.3f}", f"{compiled_ms:.3f}", f"{eager_ms / compiled_ms:.2f}", f"{first_call:.1f}"]
        table.append([str(num_requests), *times, str(new_graphs), "NO" if found else "yes"])
    show_tokens(drafter, batch, compiled.tokens)
    print(f"time per block, median of {timed_calls(batch)} calls; the first compiled call makes the graph where there is none yet:")
    show_table(["R", "eager ms", "compiled ms", "ratio", "first call s", "new graphs", "agree"], table)
    show_agreement(problems, all_excused, sum(len(batch.hidden) for batch in batches), exact)
    print(f"graph breaks: {breaks}")
    print(f"compilations: {compilations} over R = {', '.join(row[0] for row in table)} (at most {MOST_COMPILATIONS})")
    if breaks:
        problems.append(f"the drafter has {breaks} graph breaks")
    if compilations > MOST_COMPILATIONS:
        problems.append(f"{compilations} compilations over the batches, more than {MOST_COMPILATIONS}")
    return problems


def parse(argv: list[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if (number := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
        return number

    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python examples/compiled_drafter.py model.safetensors --rows 1 8 32 --steps 7",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE",
        help=f"safetensors file with {W1} [V, r], {W2} [V, r] and {LM_HEAD} [V, d]; left out, a small random one is written "
        "to a temporary folder",
    )
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 2, 7, 16, 64], metavar="R", help="batch sizes, in order (1 2 7 16 64)")
    parser.add_argument("--steps", type=positive, default=5, metavar="K", help="draft tokens of a block (5)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:1 (the GPU where there is one)")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights, requests and hidden states (0)")
    return parser.parse_args(argv)


def choose_device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device that it does not know or have
        raise InputError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from None
    if device.type not in SIZES:
        raise InputError(f"--device {name} cannot be used: it must be a CPU or a GPU of CUDA or ROCm")
    return device


@torch.inference_mode()
def run(options: argparse.Namespace) -> list[str]:
    device = choose_device(options.device)
    generator = torch.Generator().manual_seed(options.seed)  # on the CPU: the same input on every device
    written = options.file is None
    path = options.file
    if written:
        path = Path(tempfile.mkdtemp(prefix="compiled-drafter-")) / "model.safetensors"
        write_weights(path, SIZES[device.type], generator)
    drafter = make_drafter(read_weights(path, device), max(options.rows), options.steps, generator)
    batches = [make_batch(drafter, num_requests, generator) for num_requests in options.rows]
    show_set_up(path, written, drafter)
    reason = dspark_ops.why_not(**drafter.sampling(*batches[0]))
    print("plan:       step, the fused kernels" if reason is None else f"plan:       reference, plain torch operations, because {reason}")
    return run_batches(drafter, batches, exact=written)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    # cuBLAS may otherwise round the parts of a split sum to 16 bits, and then exact products no longer make exact sums.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    try:
        problems = run(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for problem in problems[:10]:
        print(f"disagreement: {problem}", file=sys.stderr)
    if len(problems) > 10:
        print(f"disagreement: and {len(problems) - 10} more", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
