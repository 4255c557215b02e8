"""vLLM's own answers (`golden/README.md`), bit for bit on every path."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from cases import COMPILED, GPU_COMPILED, GPU_REFERENCE, REFERENCE, STEP, Path, oracle, same_bits
from safetensors.torch import load_file
from torch import Tensor

import dspark_ops


@pytest.fixture(autouse=True)
def _forget_compilations() -> None:
    torch._dynamo.reset()


GOLDEN = sorted((FilePath(__file__).parent / "golden").glob("*.safetensors"))
every_case = pytest.mark.parametrize("file", GOLDEN, ids=[file.stem for file in GOLDEN])


def _load(file: FilePath) -> tuple[dict[str, Any], Tensor, Tensor | None]:
    """Arguments, expected tokens and, where the case has a cache, its expected content."""
    tensors = load_file(file)
    tokens, cache = tensors.pop("expect_tokens"), tensors.pop("expect_draft_logits", None)
    return {**tensors, "use_fp64": bool(tensors["use_fp64"])}, tokens, cache


def test_the_cases_are_there() -> None:
    assert len(GOLDEN) == 9


def _check(got: tuple[Tensor, Tensor | None], tokens: Tensor, cache: Tensor | None) -> None:
    assert got[0].tolist() == tokens.tolist()
    assert cache is None or (got[1] is not None and same_bits(got[1], cache))


@every_case
def test_oracle(file: FilePath) -> None:
    args, tokens, cache = _load(file)
    _check(oracle(args), tokens, cache)


@every_case
@pytest.mark.parametrize("path", [REFERENCE, STEP, GPU_REFERENCE, GPU_COMPILED])
def test_golden(file: FilePath, path: Path) -> None:
    args, tokens, cache = _load(file)
    _check(path(args), tokens, cache)
    if args["use_fp64"] or cache is None:
        return
    seeds, positions, slots = (args[name].to(path.device) for name in ("seeds", "sample_pos", "idx_mapping"))
    noise = dspark_ops.markov_noise(seeds, positions, slots, args["base_logits"].shape[2])
    _check(path({**args, "noise": noise}), tokens, cache)


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPILED])
@pytest.mark.parametrize("name", ["mixed_temperatures", "one_request"])
def test_golden_compiled(path: Path, name: str) -> None:
    args, tokens, cache = _load(FilePath(__file__).parent / "golden" / f"{name}.safetensors")
    _check(path(args), tokens, cache)
