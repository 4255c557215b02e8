"""What Inductor makes of the layouts of the op's arguments: at most one copy of what is computed in the graph, none of what is given."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch
from cases import Arguments, case, needs_compiler, oracle, same_bits, to
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import dspark_ops
from dspark_ops import guards, ops
from dspark_ops.guards import Call
from dspark_ops.inductor import lowering

pytestmark = needs_compiler


@pytest.mark.parametrize("strides", [(12, 4, 1), (32, 8, 1), (4, 8, 2), (0, 4, 1)], ids=["dense", "padded", "strided", "expanded"])
def test_a_layout_is_kept_in_eager_code_and_by_a_fake(strides: tuple[int, ...]) -> None:
    x = torch.randn(100).as_strided((2, 3, 4), strides)
    torch.library.opcheck(torch.ops.dspark.keep_layout.default, (x,))
    kept = torch.ops.dspark.keep_layout(x)
    assert torch.equal(kept, x) and kept.stride() == x.stride() and kept.data_ptr() != x.data_ptr()


@torch._inductor.config.patch(force_disable_caches=True)
def test_inductor_computes_what_has_another_layout_once_and_leaves_alone_what_has_not() -> None:
    assert lowering._known()
    lowering._lower()

    def kept(x: Tensor) -> tuple[Tensor, Tensor]:
        given, computed = torch.ops.dspark.keep_layout(x), torch.ops.dspark.keep_layout(x * 2)
        return given @ computed.t(), computed @ given.t()  # products call a library: their arguments are buffers

    x = torch.randn(8, 4)
    values, (code,) = run_and_get_code(torch.compile(kept, fullgraph=True), x)
    assert "keep_layout(" not in code.split("def call(")[1].split("del ")[0] and "torch.ops.dspark" not in code
    assert code.count("empty_strided_cpu((8, 4)") == 1, "x * 2"
    torch.testing.assert_close(values, kept(x))


def test_an_unknown_inductor_is_left_as_it_is_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(lowering, "KNOWN", ("1.0", "1.1"))
    monkeypatch.setattr(lowering, "_in_inductor", lambda: True)
    call = Call(*(torch.zeros(2, 2) for _ in range(4)))
    lowering._known.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="dspark_ops"):
            for _ in range(2):
                assert lowering.keep_layouts(call) is call
    finally:
        lowering._known.cache_clear()
    assert len(caplog.records) == 1 and torch.__version__ in caplog.text


def test_an_inductor_without_the_private_names_is_done_without(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing(name: str, package: str) -> None:
        raise ImportError(f"{package}{name}: no such name")

    importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(ops.importlib, "import_module", missing)
    with caplog.at_level(logging.WARNING, logger="dspark_ops"):
        assert ops._inductor_at_work() is None
    assert "dspark_ops.inductor.lowering: no such name" in caplog.text


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch._inductor.config.patch(force_disable_caches=True)  # a graph from a cache is not traced
def test_only_inductor_is_asked_to_keep_layouts(backend: str) -> None:
    seen = []

    def traced(x: Tensor) -> Tensor:
        seen.append(lowering._in_inductor())
        return x + 1

    with torch.library._scoped_library("dspark_test", "FRAGMENT") as library:
        library.define("traced(Tensor x) -> Tensor")
        library.impl("traced", traced, "CompositeImplicitAutograd")
        torch.compile(torch.ops.dspark_test.traced, backend=backend, fullgraph=True)(torch.zeros(2))
    assert any(seen) == (backend == "inductor")


# ---- On a GPU --------------------------------------------------------------------------------------------------------------------------------


def _sampled_from(how: str, args: Arguments, plan: str) -> tuple[Any, list[Any]]:
    """A function that lays out base logits and weights anew in its graph and samples, and what it is given of both."""
    rest = {name: x for name, x in args.items() if name not in ("base_logits", "markov_w2")}

    def drafter(base: Tensor, w2: Tensor) -> Tensor:
        if how == "computed":
            base, w2 = base * 1.0, w2 * 1.0
        elif how == "transposed":
            base = (base.transpose(0, 2) * 1.0).transpose(0, 2)
        elif how == "padded":
            base = torch.nn.functional.pad(base, (0, 7))[..., : base.shape[2]]
        return dspark_ops.markov_sample_sequential(base, markov_w2=w2, plan=plan, **rest)

    base = args["base_logits"]
    if how == "given padded":
        base = torch.nn.functional.pad(base, (0, 7))[..., : base.shape[2]]
    return drafter, [base, args["markov_w2"]]


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["step", "block"])
@pytest.mark.parametrize("how", ["given", "given padded", "computed", "transposed", "padded"])
@torch.inference_mode()
@torch._inductor.config.patch(force_disable_caches=True)
def test_base_logits_are_copied_once_at_most_and_the_cache_never(how: str, plan: str) -> None:
    args = to("cuda", case(rows=5, steps=4, vocab=1032))
    if plan == "block" and guards.block_device_reason(torch.device("cuda", 0)) is not None:
        pytest.skip("no block launch on this GPU")
    expected, expected_cache = oracle(args)
    drafter, given = _sampled_from(how, args, plan)
    tokens, (code,) = run_and_get_code(torch.compile(drafter, fullgraph=True), *given)
    assert torch.equal(tokens.cpu(), expected) and same_bits(args["draft_logits"].cpu(), expected_cache)
    lines = code.split("def call(")[1].splitlines()
    allocated = [line for line in lines if "empty_strided" in line]
    weights = [line for line in allocated if "((1032, " in line and "((1032, 4" not in line]
    logits = [line for line in allocated if ("1032" in line or "1039" in line) and line not in weights]
    assert len(logits) == (not how.startswith("given")), logits
    assert len(weights) == (how == "computed"), weights
    assert not any("reinterpret_tensor" in line and "copy_" in line for line in lines) and "clone" not in code
