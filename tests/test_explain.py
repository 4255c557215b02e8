"""What the report on a compiled drafter says, and that making it leaves the user's own graphs alone."""

from __future__ import annotations

import ast
import contextlib
import importlib
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Arguments, case, needs_compiler, to
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import dspark_ops
from dspark_ops.inductor import Report, explain

pytestmark = needs_compiler
module = importlib.import_module("dspark_ops.inductor.explain")  # in its package the function has the name
Kernel, MarkovOp = module.Kernel, module.MarkovOp
NO_GPU = "the tensors are on a cpu device; the fused kernels need a GPU"
CACHE = (9, 2, 97)


def _greedy(rows: int = 3, logits: torch.dtype = torch.bfloat16, *, cached: bool = True) -> Arguments:
    """A batch without noise, which compiles quickly."""
    slots, steps, vocab = CACHE
    args = case(rows=rows, steps=steps, vocab=vocab, slots=slots, logits=logits, cached=cached)
    return args | dict.fromkeys(("temperature", "seeds", "sample_pos"))


def _launches(report: Report, kind: str) -> dict[str, int]:
    assert report.kernels is not None
    return {kernel.name: kernel.launches for kernel in report.kernels if kernel.kind == kind}


class Drafter(torch.nn.Module):
    """Base logits scaled, so that there is something to fuse with; breaks its graph or reads the cache on demand."""

    def __init__(self, *, breaks: bool = False, copies: bool = False) -> None:
        super().__init__()
        self.breaks, self.copies = breaks, copies
        args = _greedy()
        for name in ("markov_w1", "markov_w2", "draft_logits"):
            self.register_buffer(name, args[name])

    def forward(self, base_logits: Tensor, anchor_ids: Tensor, idx_mapping: Tensor) -> Any:
        before = self.draft_logits.clone() if self.copies else None
        base_logits = base_logits * 1.5
        if self.breaks:
            torch._dynamo.graph_break()
        none = dict.fromkeys(("temperature", "seeds", "sample_pos"))
        weights = (self.markov_w1, self.markov_w2)
        tokens = dspark_ops.markov_sample_sequential(
            base_logits, anchor_ids, *weights, **none, idx_mapping=idx_mapping, draft_logits=self.draft_logits
        )
        return tokens, before


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    args = _greedy()
    return args["base_logits"], args["anchor_ids"], args["idx_mapping"]


def test_a_drafter_on_a_cpu() -> None:
    report = explain(Drafter(), *_batch())
    assert (report.graphs, report.breaks, report.ops) == (1, (), (("reference", NO_GPU),))
    assert _launches(report, "extern") == {"mm": 2}, "one product a step"
    assert sum(_launches(report, "C++").values()) >= 1
    assert (report.loops, report.copies, report.recompilations, report.noise) == ((), (), (), None)


def test_a_copy_of_the_cache_is_reported() -> None:
    report = explain(Drafter(copies=True), *_batch())
    assert report.copies is not None and len(report.copies) == 1 and report.copies[0].endswith(str(CACHE))


@pytest.mark.slow
def test_sizes_that_are_symbols_are_known_by_their_values() -> None:
    def twice(**kwargs: Any) -> tuple[Tensor, Tensor]:
        return dspark_ops.markov_sample_sequential(**kwargs), 2 * kwargs["base_logits"]

    for function, number in ((dspark_ops.markov_sample_sequential, 0), (twice, 1)):
        report = explain(function, dynamic=True, **_greedy(rows=9, cached=False))
        assert report.copies is not None and len(report.copies) == number
    assert re.search(r"\(s\d+, ", report.copies[0]), "the size is one that the graph does not fix"


def test_a_graph_break_has_its_place_and_reason() -> None:
    report = explain(Drafter(breaks=True), *_batch())
    assert report.graphs == 2 and report.breaks is not None
    (text,) = report.breaks
    line = Drafter.forward.__code__.co_firstlineno + 4
    assert text.startswith(f"{__file__}:{line}: Call to `torch._dynamo.graph_break()`") and "Hint" not in text
    assert report.ops == (("reference", NO_GPU),), "the op is in the second graph"


def test_recompilations_name_the_argument_that_caused_them() -> None:
    further = [_greedy(rows=4, cached=False), _greedy(logits=torch.float32, cached=False), _greedy(cached=False)]
    report = explain(dspark_ops.markov_sample_sequential, also=further, **_greedy(cached=False))
    assert report.graphs == 1 and report.recompilations is not None
    size, dtype = report.recompilations
    assert size == "tensor 'base_logits' size mismatch at index 0. expected 3, actual 4"
    assert dtype.endswith("tensor 'base_logits' dtype mismatch. expected BFloat16, actual Float")


def test_positional_arguments_are_named_as_well() -> None:
    report = explain(lambda first, second: first + second, torch.zeros(3), torch.zeros(3), also=[(torch.zeros(3), torch.zeros(3).int())])
    assert report.recompilations == ("tensor 'second' dtype mismatch. expected Float, actual Int",)


def test_a_plan_that_was_asked_for_is_told_from_one_that_had_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dspark_ops.guards, "device_reason", lambda device: None)
    monkeypatch.setattr(dspark_ops.guards, "block_device_reason", lambda device: None)
    args = {**_greedy(cached=False), "plan": "reference"}
    assert explain(dspark_ops.markov_sample_sequential, **args).ops == (("reference", "plan='reference' was asked for"),)


def test_noise_ahead_is_in_order() -> None:
    args = case(rows=2, steps=2, vocab=97)
    report = explain(dspark_ops.markov_noise, args["seeds"], args["sample_pos"], args["idx_mapping"], 97)
    assert report.noise == "in order"


def test_code_on_a_stream_overlaps() -> None:
    """As torch 2.12 and later generate it."""
    assert module._enters_a_stream(ast.parse("with stream1:\n    kernel.run(buf0, stream=raw_stream1)"))
    assert not module._enters_a_stream(ast.parse("with torch.cuda._DeviceGuard(0):\n    stream0 = get_raw_stream(0)"))


def test_without_a_markov_op_the_rest_is_told() -> None:
    report = explain(torch.nn.Linear(4, 4), torch.zeros(2, 4))
    assert report.graphs == 1 and report.ops == () and _launches(report, "extern")
    assert "no Markov op found" in str(report) and "cache" not in str(report)


def test_loops_are_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = [
        SimpleNamespace(steps=4, fused=True, reason=None),
        SimpleNamespace(steps=3, fused=False, reason="the weights differ between steps"),
    ]
    monkeypatch.setattr(module.fuse_loop, "record", lambda: contextlib.nullcontext(loops))
    monkeypatch.setattr(module, "RICH", False)
    text = str(explain(torch.sin, torch.zeros(2)))
    assert "Markov loop    4 steps, fused\nMarkov loop    3 steps, not fused, because the weights differ between steps" in text


@pytest.mark.parametrize("rich", [False, True])
def test_a_report_prints_every_line(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if rich:
        pytest.importorskip("rich")
    monkeypatch.setattr(module, "RICH", rich)
    monkeypatch.setenv("COLUMNS", "200")
    kernels = tuple(Kernel(kind, name, 2) for kind, name in (("user Triton", "step_kernel"), ("extern", "mm"), ("C++", "cpp_fused_0")))
    ops = (MarkovOp("step", None), MarkovOp("reference", "[of a kind]"))
    text = str(Report(2, ("here: why",), ops, (), kernels, ("buf1 (9, 2, 97)",), ("x changed",), "in order"))
    for line in (
        ("graphs", "2"),
        ("graph break", "here: why"),
        ("Markov op", "step"),
        ("Markov op", "reference, because [of a kind]"),
        ("user Triton launches", "2 (step_kernel 2)"),
        ("extern launches", "2 (mm 2)"),
        ("C++ launches", "2 (1 different)"),
        ("cache-sized buffer", "buf1 (9, 2, 97)"),
        ("recompilation", "x changed"),
        ("noise", "in order"),
    ):
        assert any(re.fullmatch(rf"\W*{re.escape(line[0])}\W+{re.escape(line[1])}\W*", row) for row in text.splitlines()), line
    with pytest.raises(AttributeError):
        Report(2, (), (), (), (), (), (), None).graphs = 3  # type: ignore[misc]


def test_what_an_unknown_torch_does_not_tell_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CODE", "code_by_another_name")
    report = explain(torch.sin, torch.zeros(2), also=[(torch.zeros(3),)])
    assert report.graphs == 1
    assert (report.breaks, report.kernels, report.copies, report.recompilations) == (None, None, None, None)
    assert "not known" in str(report)


def _raises(x: Tensor) -> Tensor:
    if x.dim() == 1:
        raise LookupError("the model's own")
    return x @ x


@pytest.mark.parametrize("x", [torch.zeros(2), torch.zeros(2, 3)])
def test_an_error_of_the_model_passes_unchanged(x: Tensor) -> None:
    """One that it raises itself and one that Dynamo meets in fake tensors and wraps."""
    with pytest.raises((LookupError, RuntimeError)) as eager:
        _raises(x)
    with pytest.raises(eager.type, match=f"^{re.escape(str(eager.value))}$") as explained:
        explain(_raises, x)
    assert explained.type is eager.type


def test_a_wrong_call_of_the_op_raises_its_error() -> None:
    args = _greedy(cached=False)
    with pytest.raises(TypeError, match=r"^anchor_ids must be torch\.int32 or torch\.int64, got torch\.float32"):
        explain(dspark_ops.markov_sample_sequential, **{**args, "anchor_ids": args["anchor_ids"].float()})


def test_wrong_further_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"^also\[1\] must be a tuple of positional or a dict of keyword arguments, got Tensor"):
        explain(torch.sin, torch.zeros(2), also=[(torch.zeros(2),), torch.zeros(2)])


def test_the_trace_has_no_listener_left() -> None:
    trace = logging.getLogger("torch.__trace")
    before = list(trace.handlers)
    with pytest.raises(LookupError):
        explain(_raises, torch.zeros(2))
    assert trace.handlers == before


def test_graphs_that_the_user_has_stay_and_none_is_taken() -> None:
    counter = CompileCounter()
    function = torch.compile(_double, backend=counter)
    function(torch.zeros(3))
    for _ in range(2):
        assert explain(_double, torch.zeros(3), also=[(torch.zeros(4),)]).graphs == 1
    function(torch.zeros(3))
    assert counter.frame_count == 1
    function(torch.zeros(4))
    assert counter.frame_count == 2, "the user's graph does not know that sizes changed in the reports"


def _double(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.gpu
def test_the_step_plan_is_two_kernels_a_step(cached: bool) -> None:
    steps = 3
    args = to("cuda", case(rows=3, steps=steps, vocab=97, slots=29, cached=cached))
    noise = ("seeds", "sample_pos", "idx_mapping")

    def ahead(**kwargs: Any) -> Tensor:
        return dspark_ops.markov_sample_sequential(noise=dspark_ops.markov_noise(*(kwargs[name] for name in noise), 97), **kwargs)

    report = explain(dspark_ops.markov_sample_sequential, **args, plan="step")
    assert (report.graphs, report.breaks, report.copies) == (1, (), ()) and [op.plan for op in report.ops] == ["step"]
    assert _launches(report, "user Triton") == {"step_kernel": steps, "select_kernel": steps}
    report = explain(ahead, **args, plan="step")
    assert _launches(report, "user Triton") == {"step_kernel": steps, "select_kernel": steps, "noise_kernel": 1}
    assert report.noise == "in order"


@pytest.mark.gpu
def test_the_reference_on_a_gpu_has_a_reason() -> None:
    report = explain(dspark_ops.markov_sample_sequential, **to("cuda", {**case(rows=3, steps=2, vocab=97, slots=29), "bias_scale": 0.5}))
    assert report.ops == (("reference", "the bias is scaled or capped (bias_scale, bias_soft_cap)"),)
    assert _launches(report, "user Triton") == {"noise_kernel": 1, "cache_kernel": 1} and report.copies == ()
