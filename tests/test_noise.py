"""The hash, the uniforms and the noise, against independent restatements and at their ends."""

from __future__ import annotations

import math
import struct
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from cases import EAGER_PATHS, Path, case, needs_compiler
from torch.utils._python_dispatch import TorchDispatchMode

import dspark_ops
from dspark_ops import noise, ops
from dspark_ops.kernels import gumbel
from dspark_ops.noise import DRAFT_SALT, gumbel_noise, murmur3, uniform_log, uniform_log_fp64

pytestmark = needs_compiler


def _murmur3_x86_32(data: bytes, seed: int) -> int:
    """MurmurHash3 of bytes, in Python integers."""

    def rotate(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) & 0xFFFFFFFF

    h = seed
    for (word,) in struct.iter_unpack("<I", data):
        h ^= rotate(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = (rotate(h, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def test_murmur3_known_answers() -> None:
    """Published values of MurmurHash3_x86_32, for the restatement that the next test relies on."""
    assert _murmur3_x86_32(b"", 0) == 0
    assert _murmur3_x86_32(b"", 1) == 0x514E28B7
    assert _murmur3_x86_32(b"\xff\xff\xff\xff", 0) == 0x76293B50
    assert _murmur3_x86_32(b"test", 0x9747B28C) == 0x704B81DC


@pytest.mark.parametrize("start", [0, noise.HIGH_WORD_START])
def test_hash_is_murmur3_of_the_four_words(start: int) -> None:
    seeds = [0, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    positions = [0, 1, 2**31 - 1, 2**40 + 5]
    tokens = [0, 1, 163839, 2**31 - 1]
    for step in (0, 6):
        got = murmur3(torch.tensor(seeds)[:, None], torch.tensor(positions), torch.tensor(tokens), step, start)
        for i, seed in enumerate(seeds):
            for j, position in enumerate(positions):
                for k, token in enumerate(tokens):
                    keyed = (seed ^ step << 32) & (2**64 - 1)
                    salted = (position - 1 + 2**30) & 0xFFFFFFFF
                    expected = _murmur3_x86_32(struct.pack("<QII", keyed, salted, token), start)
                    assert int(got[i, j, k]) == expected


class _NoOverflow(TorchDispatchMode):
    """Compares integer operations with FP64 ones, which are near where those wrap around."""

    checked = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor, torch.ops.aten.__lshift__.Scalar):
            x, y = args[0].double(), args[1]
            exact = x * 2.0**y if func is torch.ops.aten.__lshift__.Scalar else func(x, y)
            assert ((result.double() - exact).abs() < 2.0**20).all(), f"{func} overflows"
            self.checked += 1
        return result


def test_no_integer_of_the_hash_overflows() -> None:
    """In the C++ that Inductor makes that is undefined: it once let the compiler drop the bounds of a loop."""
    ends = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63)])
    random = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=torch.Generator().manual_seed(0))
    numbers = torch.cat([ends, random])
    with _NoOverflow() as mode:
        murmur3(numbers, numbers.flip(0), ends, 7, noise.HIGH_WORD_START)
    assert mode.checked > 20


def test_compiled_hash_is_the_eager_hash() -> None:
    """Inductor vectorises the columns, with a remainder of every length."""
    torch._dynamo.reset()
    compiled = torch.compile(murmur3, fullgraph=True)
    seeds, positions, step = torch.tensor([5, -(2**63) + 1])[:, None], torch.tensor([7, 2**31 - 1]), torch.arange(2)
    for vocab in range(1, 71):
        ids = torch.arange(vocab)
        torch._dynamo.decorators.mark_unbacked(ids, 0)
        assert torch.equal(compiled(seeds, positions, ids, step), murmur3(seeds, positions, ids, step)), vocab


@pytest.mark.slow
def test_compiled_noise_stays_within_its_memory() -> None:
    """An index expression that overflowed let the C++ compiler drop the bound of the remainder, one of 33 columns, and overwrite the heap."""
    script = """
import torch, dspark_ops
arguments = torch.ones(2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64), torch.arange(1), 33
compiled = torch.compile(dspark_ops.markov_noise, fullgraph=True)
for _ in range(200):
    noise = compiled(*arguments)
    [torch.empty(3 + i) for i in range(50)]
torch.testing.assert_close(noise, dspark_ops.markov_noise(*arguments))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_both_ends_of_the_uniform_give_finite_noise() -> None:
    ends = torch.tensor([0, 1, 127, 0xFFFFFFFF, 0xFFFFFF80, 0xFFFFFF7F, 0x3FFFFFFF, 0x40000000])
    g = -uniform_log(ends).log()
    assert g.isfinite().all()
    assert g[0] > 22.8 and g[0] > g[1] > g[2], "the smallest uniform wins"
    assert g[3] == g[4] == pytest.approx(-math.log(24 * math.log(2))), "u = 1 is kept from infinite noise"
    high = torch.tensor([0, 0xFFFFFFFF, 0, 0xFFFFFFFF])
    low = torch.tensor([0, 0xFFFFFFFF, 0xFFFFFFFF, 0])
    assert (-uniform_log_fp64(low, high).log()).isfinite().all()
    assert uniform_log_fp64(low, high)[0] > uniform_log_fp64(low, high)[1] > 0


def test_uniform_log_matches_high_precision() -> None:
    h = torch.randint(2**32, (100_000,), generator=torch.Generator().manual_seed(1))
    exact = -torch.log1p(-((h.double() + 0.5) * 2.0**-32))
    error = (uniform_log(h).double() - exact).abs() / exact
    quarter = 2**30
    assert (error[h < quarter] < 2.2e-6).all(), "the series leaves out u^8 / 9 + u^9 / 10 + ..., 2.1e-6 at u = 1/4"
    # Above, the rounding of u to FP32, at most 2^-25, is magnified by 1 / (1 - u).
    assert (error[(h >= quarter) & (h < int(0.99 * 2**32))] < 2e-6).all()


def test_draft_and_verification_do_not_share_noise() -> None:
    """The draft's noise at a position is that of another position for an unsalted hash: streams of 1e5 draws do not correlate."""
    seeds, positions, tokens = torch.tensor([11]), torch.tensor([500]), torch.arange(100_000)
    salted = gumbel_noise(seeds, positions, tokens, step=0)[0]
    unsalted = gumbel_noise(seeds, positions - DRAFT_SALT, tokens, step=0)[0]
    assert torch.corrcoef(torch.stack([salted, unsalted]))[0, 1].abs() < 0.015
    assert torch.equal(gumbel_noise(seeds, positions + DRAFT_SALT - DRAFT_SALT, tokens, step=0)[0], salted)


def test_steps_seeds_positions_and_tokens_are_separate_streams() -> None:
    tokens = torch.arange(100_000)
    one = gumbel_noise(torch.tensor([11]), torch.tensor([500]), tokens, step=0)[0]
    for other in (
        gumbel_noise(torch.tensor([11]), torch.tensor([500]), tokens, step=1),
        gumbel_noise(torch.tensor([12]), torch.tensor([500]), tokens, step=0),
        gumbel_noise(torch.tensor([11]), torch.tensor([501]), tokens, step=0),
        gumbel_noise(torch.tensor([11 + (1 << 40)]), torch.tensor([500]), tokens, step=0),
        gumbel_noise(torch.tensor([11]), torch.tensor([500]), tokens + 100_000, step=0),
    ):
        assert torch.corrcoef(torch.stack([one, other[0]]))[0, 1].abs() < 0.015


@pytest.mark.parametrize("use_fp64", [False, True])
def test_noise_is_gumbel(use_fp64: bool) -> None:
    g = gumbel_noise(torch.arange(10), torch.arange(10) + 7, torch.arange(100_000), step=2, use_fp64=use_fp64).double().flatten()
    assert g.mean() == pytest.approx(0.5772156649, abs=0.004)
    assert g.var() == pytest.approx(math.pi**2 / 6, abs=0.01)
    for x in (-1.0, 0.0, 1.0, 4.0):
        assert (g <= x).double().mean() == pytest.approx(math.exp(-math.exp(-x)), abs=0.002)


def test_gumbel_noise_broadcasts_rows_and_steps() -> None:
    seeds, positions = torch.tensor([[3], [4]]), torch.tensor([[8, 9, 10], [20, 21, 22]])
    block = gumbel_noise(seeds, positions, torch.arange(50), step=torch.arange(3, dtype=torch.int32))
    assert block.shape == (2, 3, 50)
    for step in range(3):
        assert torch.equal(block[:, step], gumbel_noise(seeds[:, 0], positions[:, step], torch.arange(50), step=step))


@pytest.mark.parametrize("path", EAGER_PATHS)
def test_markov_noise_is_the_argument_of_gumbel_noise(path: Path) -> None:
    args = case()
    args["idx_mapping"][1] = -1
    seeds, positions, slots = (args[name].to(path.device) for name in ("seeds", "sample_pos", "idx_mapping"))
    offsets = torch.arange(200, device=path.device)  # target ids 0, 2, 4, ...
    for use_fp64 in (False, True):
        for draft_to_target in (None, offsets):
            ahead = dspark_ops.markov_noise(seeds, positions, slots, 200, draft_to_target=draft_to_target, use_fp64=use_fp64)
            assert ahead.dtype == ops.key_dtype(use_fp64) and (ahead > 0).all() and (ahead[1] == 1).all()
            ids = torch.arange(200, device=path.device) * (1 if draft_to_target is None else 2)
            for row in (0, 2, 3, 4):
                expected = gumbel_noise(
                    seeds[slots[row].long()].expand(3), positions[row], ids, step=torch.arange(3, device=path.device), use_fp64=use_fp64
                )
                # The logarithms of a CPU and of a GPU may differ by an ulp or two.
                torch.testing.assert_close(-ahead[row].log(), expected, rtol=1e-6, atol=1e-6)


@triton.jit
def _uniform_log_kernel(out_ptr, first, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, gumbel.uniform_log((first + i).to(tl.uint32)))


@pytest.mark.gpu
def test_the_series_is_the_kernels_for_every_hash() -> None:
    """The FP64 emulation of fused multiply-adds gives the bits of the device's instructions wherever the series serves: u < 1/4."""
    out = torch.empty(2**26, device="cuda")
    for first in range(0, 2**30, 2**26):
        _uniform_log_kernel[(2**16,)](out, first, BLOCK=1024)
        assert torch.equal(out, uniform_log(torch.arange(first, first + 2**26, device="cuda"))), first
