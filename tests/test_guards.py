"""Wrong arguments and unfused calls: the same error everywhere, nothing written, and one predicate behind functions and ops."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from cases import HALF, Arguments, case, needs_compiler, oracle

import dspark_ops
from dspark_ops import guards
from dspark_ops.guards import Call

pytestmark = needs_compiler


def _i8(t: torch.Tensor) -> torch.Tensor:
    return (8 * t.float()).to(torch.int8)


def _strided(args: Arguments, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(20_000, dtype=args["draft_logits"].dtype).as_strided(shape, strides)


# Name of the argument in the message, its error, and the change that makes a valid call wrong.
WRONG: list[tuple[str, type[Exception], Any]] = [
    ("base_logits", TypeError, lambda a: {"base_logits": a["base_logits"].double()}),
    ("base_logits", ValueError, lambda a: {"base_logits": a["base_logits"][0]}),
    ("base_logits", ValueError, lambda a: {"base_logits": a["base_logits"][..., :0], "markov_w2": a["markov_w2"][:0]}),
    ("anchor_ids", TypeError, lambda a: {"anchor_ids": a["anchor_ids"].float()}),
    ("anchor_ids", ValueError, lambda a: {"anchor_ids": a["anchor_ids"][:2]}),
    ("anchor_ids", ValueError, lambda a: {"anchor_ids": a["anchor_ids"][:, None]}),
    ("markov_w1", TypeError, lambda a: {"markov_w1": _i8(a["markov_w1"])}),
    ("markov_w1", ValueError, lambda a: {"markov_w1": a["markov_w1"][:, :0], "markov_w2": a["markov_w2"][:, :0]}),
    ("markov_w1", ValueError, lambda a: {"markov_w1": a["markov_w1"][:150]}),
    ("markov_w1", TypeError, lambda a: {"markov_w1": a["markov_w1"].to_sparse()}),
    ("markov_w2", TypeError, lambda a: {"markov_w2": _i8(a["markov_w2"]).view(torch.uint8)}),
    ("markov_w2", TypeError, lambda a: {"markov_w2": a["markov_w2"].to(torch.float8_e4m3fn)}),
    ("markov_w2", TypeError, lambda a: {"markov_w2": a["markov_w2"].float()}),
    ("markov_w2", ValueError, lambda a: {"markov_w2": a["markov_w2"][:, :8]}),
    ("markov_w2", ValueError, lambda a: {"markov_w2": a["markov_w2"][:150]}),
    ("markov_w2", ValueError, lambda a: {"markov_w2": a["markov_w2"].to("meta")}),
    ("temperature", TypeError, lambda a: {"temperature": a["temperature"].double()}),
    ("temperature", ValueError, lambda a: {"temperature": a["temperature"][0]}),
    ("draft_logits", ValueError, lambda a: {"temperature": a["temperature"][:6], "seeds": a["seeds"][:6]}),
    ("seeds", TypeError, lambda a: {"seeds": a["seeds"].to(torch.int32)}),
    ("seeds", TypeError, lambda a: {"seeds": a["seeds"].view(torch.uint64)}),
    ("seeds", ValueError, lambda a: {"seeds": a["seeds"][:6]}),
    ("seeds", ValueError, lambda a: {"seeds": None}),
    ("sample_pos", ValueError, lambda a: {"sample_pos": None}),
    ("sample_pos", ValueError, lambda a: {"sample_pos": a["sample_pos"][:, :2]}),
    ("sample_pos", TypeError, lambda a: {"sample_pos": a["sample_pos"].to(torch.int16)}),
    ("idx_mapping", ValueError, lambda a: {"idx_mapping": None}),
    ("idx_mapping", ValueError, lambda a: {"idx_mapping": None, "temperature": None}),
    ("idx_mapping", ValueError, lambda a: {"idx_mapping": a["idx_mapping"][:4]}),
    ("idx_mapping", ValueError, lambda a: {"idx_mapping": a["idx_mapping"][:, None].repeat(1, 2)}),
    ("draft_logits", TypeError, lambda a: {"draft_logits": a["draft_logits"].float()}),
    ("draft_logits", TypeError, lambda a: {"draft_logits": a["draft_logits"].half()}),
    ("draft_logits", TypeError, lambda a: {"output_scale": 2.0}),
    ("draft_logits", ValueError, lambda a: {"draft_logits": a["draft_logits"][:, :2]}),
    ("draft_logits", ValueError, lambda a: {"draft_logits": a["draft_logits"][..., :190]}),
    ("draft_logits", ValueError, lambda a: {"draft_logits": a["draft_logits"][:6]}),
    ("draft_logits", ValueError, lambda a: {"draft_logits": a["draft_logits"][:1].expand(7, 3, 200)}),
    ("draft_logits", ValueError, lambda a: {"draft_logits": _strided(a, (7, 3, 200), (200, 100, 1))}),
    ("draft_logits", ValueError, lambda a: {"draft_logits": _strided(a, (7, 3, 200), (200, 200, 1))}),
    ("draft_logits", ValueError, lambda a: {"draft_logits": _strided(a, (7, 3, 200), (400, 200, 1))}),
    ("draft_logits", ValueError, lambda a: {"draft_logits": _strided(a, (7, 3, 200), (1, 7, 20))}),
    ("cache_rows", ValueError, lambda a: {"cache_rows": torch.zeros(7, dtype=torch.int32), "draft_logits": None}),
    ("cache_rows", ValueError, lambda a: {"cache_rows": torch.zeros(6, dtype=torch.int32)}),
    ("cache_rows", TypeError, lambda a: {"cache_rows": torch.zeros(7)}),
    ("noise", TypeError, lambda a: {"noise": torch.ones(5, 3, 200, dtype=torch.float64)}),
    ("noise", TypeError, lambda a: {"noise": torch.ones(5, 3, 200), "use_fp64": True}),
    ("noise", ValueError, lambda a: {"noise": torch.ones(5, 2, 200)}),
    ("noise", ValueError, lambda a: {"noise": torch.ones(5, 3, 199)}),
    ("vocab_size", ValueError, lambda a: {"vocab_size": 201}),
    ("vocab_size", ValueError, lambda a: {"vocab_size": 0}),
    ("draft_to_target", TypeError, lambda a: {"draft_to_target": torch.zeros(200, dtype=torch.int32)}),
    ("draft_to_target", ValueError, lambda a: {"draft_to_target": torch.zeros(199, dtype=torch.int64)}),
    ("draft_logits", ValueError, lambda a: {"markov_w1": a["markov_w1"].repeat(2, 1), "draft_to_target": torch.zeros(200, dtype=torch.int64)}),
    ("bias_soft_cap", ValueError, lambda a: {"bias_soft_cap": 0.0}),
    ("bias_scale", ValueError, lambda a: {"bias_scale": float("nan")}),
    ("output_soft_cap", ValueError, lambda a: {"output_soft_cap": -30.0}),
    ("output_scale", ValueError, lambda a: {"output_scale": float("inf")}),
    ("plan", ValueError, lambda a: {"plan": "blocks"}),
    ("plan", ValueError, lambda a: {"plan": "step"}),  # on a CPU
]
# What is wrong with the type of an argument that is no tensor: a schema refuses these before a body of an op can.
WRONG_TYPE: list[tuple[str, type[Exception], Any]] = [
    ("base_logits", TypeError, lambda a: {"base_logits": a["base_logits"].float().numpy()}),
    ("anchor_ids", TypeError, lambda a: {"anchor_ids": [1, 2, 3, 4, 5]}),
    ("temperature", TypeError, lambda a: {"temperature": 0.8}),
    ("draft_to_target", TypeError, lambda a: {"draft_to_target": [0] * 200}),
]
# Options of a wrong type: a schema would convert some of them.
WRONG_OPTIONS: list[tuple[str, type[Exception], Any]] = [
    (name, TypeError, lambda a, name=name, x=x: {name: x})
    for name, x in [
        ("vocab_size", 150.0),
        ("vocab_size", True),
        ("vocab_size", torch.tensor(150)),
        ("bias_scale", "2"),
        ("bias_scale", True),
        ("bias_soft_cap", torch.tensor(30.0)),
        ("output_scale", None),
        ("output_soft_cap", False),
        ("use_fp64", 1),
        ("use_fp64", "yes"),
        ("use_fp64", None),
        ("plan", None),
        ("plan", 3),
    ]
]


def _raises(function: Any, args: Arguments, name: str, error: type[Exception]) -> str:
    cache = args["draft_logits"]
    before = None if cache is None else cache.clone()
    with pytest.raises(error) as raised:
        function(**args)
    message = str(raised.value)
    assert type(raised.value) is error and message.startswith(name), message
    assert ", got " in message, message
    assert before is None or torch.equal(cache, before), "nothing is written before the checks pass"
    return message


@pytest.mark.parametrize(("name", "error", "change"), [*WRONG, *WRONG_TYPE, *WRONG_OPTIONS])
def test_wrong_arguments_name_themselves(name: str, error: type[Exception], change: Any) -> None:
    args = case()
    args |= change(args)
    message = _raises(dspark_ops.markov_sample_sequential, args, name, error)
    assert _raises(dspark_ops.why_not, args, name, error) == message


@pytest.mark.parametrize(("name", "error", "change"), WRONG)
def test_the_op_itself_raises_the_same(name: str, error: type[Exception], change: Any) -> None:
    args = case()
    args |= change(args)
    message = _raises(dspark_ops.markov_sample_sequential, args, name, error)
    assert _raises(torch.ops.dspark.markov_sample_sequential, args, name, error) == message


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_code_raises_the_same(dynamic: bool | None) -> None:
    for name, error, change in WRONG if dynamic else WRONG[::6]:
        args = case()
        args |= change(args)
        if dynamic and args.get("bias_scale") != args.get("bias_scale"):
            continue  # Dynamo cannot compare a symbolic NaN
        message = _raises(dspark_ops.markov_sample_sequential, args, name, error)
        torch._dynamo.reset()
        for function in (dspark_ops.markov_sample_sequential, torch.ops.dspark.markov_sample_sequential):
            if "meta" in message or "sparse" in message.lower():
                continue  # compilers refuse these before they see the call
            compiled = torch.compile(lambda f=function, **a: f(**a), fullgraph=True, dynamic=dynamic, backend="aot_eager")
            assert _raises(compiled, args, name, error) == message


@pytest.mark.parametrize("dynamic", [None, True])
def test_options_of_a_wrong_type_are_refused_by_every_road(dynamic: bool | None) -> None:
    for name, error, change in WRONG_OPTIONS:
        args = case()
        args |= change(args)
        message = _raises(dspark_ops.markov_sample_sequential, args, name, error)
        with torch.profiler.profile():  # which keeps the call from going past the dispatcher
            assert _raises(dspark_ops.markov_sample_sequential, args, name, error) == message
        torch._dynamo.reset()
        compiled = torch.compile(dspark_ops.markov_sample_sequential, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        assert _raises(compiled, args, name, error) == message


@pytest.mark.parametrize(
    ("name", "backend"), [("bias_scale", "eager"), ("bias_soft_cap", "eager"), pytest.param("bias_scale", "aot_eager", marks=pytest.mark.slow)]
)
def test_numbers_that_vary_and_those_of_numpy_are_numbers(name: str, backend: str) -> None:
    torch._dynamo.reset()
    args = case(rows=2, steps=1, vocab=97)
    compiled = torch.compile(dspark_ops.markov_sample_sequential, fullgraph=True, dynamic=True, backend=backend)
    for number in (2, 0.5, 0.25):
        changed = {**args, name: number}
        assert torch.equal(compiled(**changed), oracle(changed)[0]), number
    numpy = pytest.importorskip("numpy")
    changed = {**args, name: numpy.float64(0.5)}
    assert torch.equal(dspark_ops.markov_sample_sequential(**changed), oracle({**args, name: 0.5})[0])
    with pytest.raises(TypeError, match=rf"^{name} must be a number, got float32"):
        dspark_ops.markov_sample_sequential(**{**args, name: numpy.float32(0.5)})


def test_a_cache_may_have_any_strides_that_keep_its_elements_apart() -> None:
    args = case(slots=7)
    dtype = args["draft_logits"].dtype
    wide = torch.zeros(9, 5, 800, dtype=dtype)
    caches = [wide[1:8, 1:4, 50:250], wide[1:8, ::2, :200], torch.zeros(3, 7, 200, dtype=dtype).transpose(0, 1)]
    caches += [torch.zeros(200, 3, 7, dtype=dtype).permute(2, 1, 0), wide[2:9, :4, :201]]
    for cache in caches:
        assert guards.error(Call(**{**args, "draft_logits": cache}), "auto") is None, cache.stride()
    odd = {**case(rows=1, steps=1, slots=1), "draft_logits": wide.as_strided((1, 1, 200), (0, 3, 1))}
    assert guards.error(Call(**odd), "auto") is None, "the stride of a single element is never used"
    torch._dynamo.reset()
    compiled = torch.compile(dspark_ops.markov_sample_sequential, fullgraph=True, dynamic=True, backend="eager")
    for cache in caches[:3]:
        compiled(**{**args, "draft_logits": cache})


def test_noise_names_its_wrong_arguments() -> None:
    seeds, positions, slots = torch.arange(4), torch.ones(2, 3, dtype=torch.int64), torch.tensor([0, 1])
    for name, error, call in [
        ("seeds", TypeError, (seeds.int(), positions, slots, 5)),
        ("sample_pos", ValueError, (seeds, positions[0], slots, 5)),
        ("idx_mapping", ValueError, (seeds, positions, slots[:1], 5)),
        ("vocab_size", ValueError, (seeds, positions, slots, 0)),
    ]:
        for function in (dspark_ops.markov_noise, torch.ops.dspark.markov_noise):
            with pytest.raises(error, match=rf"^{name} must") as eager:
                function(*call)
            torch._dynamo.reset()
            with pytest.raises(error, match=rf"^{name} must") as compiled:
                torch.compile(lambda *a, f=function: f(*a), fullgraph=True, backend="aot_eager")(*call)
            assert str(compiled.value) == str(eager.value)
    with pytest.raises(TypeError, match=r"^vocab_size must be an int"):
        dspark_ops.markov_noise(seeds, positions, slots, 5.5)  # type: ignore[arg-type]  # what is tested
    for use_fp64 in (1, "yes", None):
        for function in (dspark_ops.markov_noise, torch.compile(dspark_ops.markov_noise, fullgraph=True, backend="aot_eager")):
            with pytest.raises(TypeError, match=r"^use_fp64 must be a bool, got"):
                function(seeds, positions, slots, 5, use_fp64=use_fp64)
        with pytest.raises(TypeError, match=r"^use_fp64 must be a bool, got"):
            dspark_ops.gumbel_noise(seeds, seeds, torch.arange(5), step=0, use_fp64=use_fp64)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(TypeError, match=r"^seeds must be int64"):
        dspark_ops.gumbel_noise(seeds.int(), positions[0, :1], torch.arange(5), step=0)
    with pytest.raises(TypeError, match=r"^positions must"):
        dspark_ops.gumbel_noise(seeds, seeds.float(), torch.arange(5), step=0)
    with pytest.raises(TypeError, match=r"^seeds must be a torch.Tensor"):
        dspark_ops.gumbel_noise(7, positions[0], torch.arange(5), step=0)  # type: ignore[arg-type]  # what is tested
    for step in (0.5, torch.zeros(4)):
        with pytest.raises(TypeError, match=r"^step must"):
            dspark_ops.gumbel_noise(seeds, seeds, torch.arange(5), step=step)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ValueError, match=r"^positions must broadcast"):
        dspark_ops.gumbel_noise(seeds, positions[0], torch.arange(5), step=0)


def test_why_not_has_the_arguments_of_the_function_and_returns_a_reason() -> None:
    signature = inspect.signature(dspark_ops.why_not)
    assert signature.parameters == inspect.signature(dspark_ops.markov_sample_sequential).parameters
    assert signature.return_annotation == "str | None"


# Calls that the reference serves and the fused kernels do not, with a word of the reason.
UNFUSED: list[tuple[str, Any]] = [
    ("no requests", lambda a: case(rows=0)),
    ("no steps", lambda a: case(steps=0)),
    ("reduced", lambda a: {"draft_to_target": torch.zeros(200, dtype=torch.int64)}),
    ("scaled", lambda a: {"bias_scale": 0.5}),
    ("capped", lambda a: {"bias_soft_cap": 30.0}),
    ("transformed", lambda a: {"output_scale": 0.5, "draft_logits": a["draft_logits"].float()}),
    ("transformed", lambda a: {"output_soft_cap": 30.0, "draft_logits": a["draft_logits"].float()}),
    ("rank", lambda a: {"markov_w1": a["markov_w1"][:, :8], "markov_w2": a["markov_w2"][:, :8]}),
    ("rank", lambda a: {"markov_w1": a["markov_w1"].repeat(1, 33), "markov_w2": a["markov_w2"].repeat(1, 33)}),
    ("markov_w1", lambda a: {"markov_w1": a["markov_w1"].t().contiguous().t()}),
    ("markov_w2", lambda a: {"markov_w2": a["markov_w2"].t().contiguous().t()}),
    ("base_logits", lambda a: {"base_logits": a["base_logits"].transpose(1, 2).contiguous().transpose(1, 2)}),
    ("draft_logits", lambda a: {"draft_logits": a["draft_logits"].transpose(1, 2).contiguous().transpose(1, 2)}),
    ("noise", lambda a: {"noise": torch.ones(5, 200, 3).transpose(1, 2)}),
]


@pytest.fixture
def any_device_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the reasons that do not lie in the device; it is one without the block launch."""
    monkeypatch.setattr(guards, "device_reason", lambda device: None)
    monkeypatch.setattr(guards, "block_device_reason", lambda device: "no block launch on this device")


@pytest.mark.usefixtures("any_device_serves")
def test_a_plain_call_has_no_reason() -> None:
    assert dspark_ops.why_not(**case()) is None
    assert guards.choose(Call(**case()), "auto") == ("step", "no block launch on this device")
    assert guards.choose(Call(**case()), "step") == ("step", "plan='step' was asked for")
    assert guards.choose(Call(**case()), "reference") == ("reference", "plan='reference' was asked for")


@pytest.mark.parametrize(
    ("word", "change"),
    [
        ("FP64", lambda a: {"use_fp64": True}),
        ("FP32", lambda a: {"markov_w1": a["markov_w1"].float(), "markov_w2": a["markov_w2"].float()}),
        ("16 bytes", lambda a: {"markov_w2": torch.zeros(200 * 17, dtype=HALF).as_strided((200, 16), (17, 1))}),
        ("16 bytes", lambda a: {"markov_w2": torch.zeros(201 * 16, dtype=HALF)[1:][: 200 * 16].view(200, 16)}),
    ],
)
def test_what_one_launch_cannot_do_step_launches_do(word: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "device_reason", lambda device: None)
    monkeypatch.setattr(guards, "block_device_reason", lambda device: None)
    args = case()
    assert guards.choose(Call(**args), "auto") == ("block", None)
    args |= change(args)
    plan, reason = guards.choose(Call(**args), "auto")
    assert plan == "step" and reason is not None and word in reason
    assert dspark_ops.why_not(**args) is None, "the fused kernels serve it"
    with pytest.raises(ValueError, match="got 'block', which cannot"):
        dspark_ops.markov_sample_sequential(**args, plan="block")


@pytest.mark.usefixtures("any_device_serves")
@pytest.mark.parametrize(("word", "change"), UNFUSED)
def test_why_not_and_the_op_agree(word: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = case()
    args |= change(args)
    reason = dspark_ops.why_not(**args)
    assert reason is not None and word in reason
    if args["base_logits"].numel() > 0:  # an empty batch is served by any plan
        with pytest.raises(ValueError, match=r"plan must be 'auto' or one that serves this call, got 'step'") as raised:
            torch.ops.dspark.markov_sample_sequential(**args, plan="step")
        assert reason in str(raised.value)

    def launched(*_: Any) -> torch.Tensor:
        raise AssertionError("the kernels were launched")

    monkeypatch.setattr(dspark_ops.ops, "launch_steps", launched)
    monkeypatch.setattr(dspark_ops.ops, "_negated_noise", dspark_ops.reference.negated_noise)
    monkeypatch.setattr(dspark_ops.ops, "_write_cache", dspark_ops.reference.write_cache)
    assert torch.ops.dspark.markov_sample_sequential(**args).shape == args["base_logits"].shape[:2]
    with pytest.raises(AssertionError, match="launched"):
        torch.ops.dspark.markov_sample_sequential(**case())


def test_the_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dspark_ops")
    guards.note_once.cache_clear()
    for _ in range(3):
        dspark_ops.markov_sample_sequential(**case())
    assert [record.message for record in caplog.records if record.name == "dspark_ops"] == [
        f"markov_sample_sequential is served by the reference: {dspark_ops.why_not(**case())}"
    ]
    caplog.clear()
    torch._dynamo.reset()
    compiled = torch.compile(dspark_ops.markov_sample_sequential, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        compiled(**case())
    assert len([record for record in caplog.records if record.name == "dspark_ops"]) == 1


def test_import_works_without_triton() -> None:
    script = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else find_spec(name, *a)
sys.modules["triton"] = None
import torch, dspark_ops
from dspark_ops import guards
assert not guards.has_triton()
print(guards.device_reason(torch.device("cuda")))
print(dspark_ops.gumbel_noise(torch.tensor([1]), torch.tensor([2]), torch.arange(3), step=0).shape)
logits, ids, weights = torch.zeros(1, 2, 4), torch.zeros(1, dtype=torch.int64), torch.zeros(4, 16)
print(dspark_ops.markov_sample_sequential(logits, ids, weights, weights, temperature=None, seeds=None, sample_pos=None, idx_mapping=None))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["Triton is not installed", "torch.Size([1, 3])", "tensor([[0, 0]])"]
