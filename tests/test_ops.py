"""The operators under opcheck, torch.compile, export and the compile cache."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from cases import Arguments, case, gpu, needs_compiler, oracle, same_bits, same_layout, to
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import dspark_ops
from dspark_ops import guards, reference
from dspark_ops.guards import Call
from dspark_ops.inductor import lowering

pytestmark = needs_compiler
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
SUBTESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def _forget_compilations() -> None:
    torch._dynamo.reset()


def _layouts(args: Arguments) -> list[Arguments]:
    base = args["base_logits"]
    wide = torch.full((7, base.shape[1] + 1, base.shape[2] + 8), -7.0, dtype=base.dtype, device=base.device)
    return [{}, {"base_logits": base.transpose(0, 1).contiguous().transpose(0, 1), "draft_logits": wide[:, :, : base.shape[2]]}]


CHECKED = [
    pytest.param(dtype, cache, marks=() if (dtype, cache) == (torch.bfloat16, True) else pytest.mark.slow)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for cache in (True, False)
]


@every_device
@pytest.mark.parametrize(("dtype", "cache"), CHECKED)
def test_opcheck(device: str, dtype: torch.dtype, cache: bool) -> None:
    args = to(device, case(rows=3, steps=2, vocab=97, slots=7, logits=dtype, weights=dtype))
    plans = ["auto"] if device == "cpu" else ["step", "reference"]
    for plan in plans:
        for layout in _layouts(args):
            call = {**args, **layout, "plan": plan} | ({} if cache else {"draft_logits": None})
            torch.library.opcheck(torch.ops.dspark.markov_sample_sequential.default, (), call, test_utils=SUBTESTS)


@every_device
@pytest.mark.slow
def test_opcheck_of_options_and_zero_sizes(device: str) -> None:
    op = torch.ops.dspark.markov_sample_sequential.default
    plain = case(rows=3, steps=2, vocab=97, slots=7)
    for change in (
        case(rows=0, steps=2, vocab=97, slots=7),
        case(rows=3, steps=0, vocab=97, slots=7),
        {"use_fp64": True},
        {"vocab_size": 90},
        {"cache_rows": torch.arange(7, dtype=torch.int32)},
        {"draft_to_target": torch.arange(97).flip(0) - torch.arange(97)},
        {"noise": torch.rand(3, 2, 97) + 0.1, "seeds": None},
        {"bias_scale": 0.5, "output_scale": 2.0, "draft_logits": None},
        {"temperature": None, "seeds": None, "sample_pos": None, "idx_mapping": None, "draft_logits": None},
        {"markov_w1": torch.nn.Parameter(plain["markov_w1"]), "markov_w2": torch.nn.Parameter(plain["markov_w2"])},
    ):
        torch.library.opcheck(op, (), to(device, {**plain, **change}), test_utils=SUBTESTS)
    slots = [plain[name].to(device) for name in ("seeds", "sample_pos", "idx_mapping")]
    torch.library.opcheck(torch.ops.dspark.markov_noise.default, (*slots, 97), test_utils=SUBTESTS)


def _batch(rows: int, device: str = "cpu") -> Arguments:
    """A batch of one drafter: what does not depend on R is the same."""
    args = to(device, case(rows=64, steps=3, vocab=97, slots=70))
    return args | {name: args[name][:rows] for name in ("base_logits", "anchor_ids", "sample_pos", "idx_mapping")}


@every_device
@pytest.mark.parametrize(
    ("mark", "batches", "graphs"),
    [
        ("", (1, 2, 7, 16, 64, 33), 2),
        ("dynamic", (2, 1, 7, 16, 64, 33), 2),
        pytest.param("dynamic", (33, 64, 2, 8, 1), 2, marks=pytest.mark.slow),
        ("unbacked", (3, 0, 1, 64, 2), 1),
    ],
)
def test_number_of_graphs_over_batches(device: str, mark: str, batches: tuple[int, ...], graphs: int) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(dspark_ops.markov_sample_sequential, backend=counter, fullgraph=True)
    for rows in batches:
        args = _batch(rows, device)
        for name in ("base_logits", "anchor_ids", "sample_pos", "idx_mapping"):
            if mark == "unbacked":
                torch._dynamo.decorators.mark_unbacked(args[name], 0)
            elif mark == "dynamic" and rows > 1:
                torch._dynamo.mark_dynamic(args[name], 0)
        tokens = compiled(**args)
        expected, expected_cache = oracle(_batch(rows))
        assert torch.equal(tokens.cpu(), expected) and same_bits(args["draft_logits"].cpu(), expected_cache)
    assert counter.frame_count <= graphs


def test_inductor_compiles_the_write_of_the_cache_for_every_batch() -> None:
    """Its C++ for reductions differs where R is symbolic, which no other backend shows."""

    @functools.partial(torch.compile, fullgraph=True)
    def write(cache: torch.Tensor, slots: torch.Tensor, logits: torch.Tensor) -> None:
        call = Call(logits, slots, logits, logits, idx_mapping=slots, draft_logits=cache)
        reference.write_cache(call, cache.shape[0], None, logits)

    for rows in (5, 33):
        args = _batch(rows)
        cache, slots, logits = args["draft_logits"], args["idx_mapping"], args["base_logits"]
        slots[1] = -1
        for t in (slots, logits):
            torch._dynamo.mark_dynamic(t, 0)
        expected = cache.clone()
        expected[slots[slots >= 0].long()] = logits[slots >= 0]
        write(cache, slots, logits)
        assert same_bits(cache, expected)


@pytest.mark.slow
def test_everything_symbolic_gives_the_same() -> None:
    compiled = torch.compile(dspark_ops.markov_sample_sequential, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows, steps, vocab, rank in ((3, 2, 97, 16), (4, 3, 111, 32)):
        args = case(rows=rows, steps=steps, vocab=vocab, rank=rank)
        assert torch.equal(compiled(**{**args, "draft_logits": args["draft_logits"].clone()}), oracle(args)[0])


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_padded_vocabulary_may_vary(dynamic: bool | None) -> None:
    """From its second value on the number is symbolic."""
    for function in (dspark_ops.markov_sample_sequential, torch.ops.dspark.markov_sample_sequential):
        torch._dynamo.reset()
        compiled = torch.compile(lambda f=function, **args: f(**args), backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for vocab_size in (90, 91, 95):
            args = {**case(rows=3, steps=2, vocab=97), "vocab_size": vocab_size}
            expected, expected_cache = oracle(args)
            assert torch.equal(compiled(**args), expected), vocab_size
            assert same_bits(args["draft_logits"], expected_cache), vocab_size
        with pytest.raises(ValueError, match=r"^vocab_size must be from 1 to V of base_logits \(97\), got 98"):
            compiled(**{**args, "vocab_size": 98})


def test_metadata_and_flags_are_guards() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(dspark_ops.markov_sample_sequential, backend=counter, fullgraph=True)
    args = case(rows=3, steps=2, vocab=97)
    changes: list[Arguments] = [
        {},
        {"base_logits": args["base_logits"].float(), "draft_logits": args["draft_logits"].float()},
        {"base_logits": args["base_logits"].transpose(0, 1).contiguous().transpose(0, 1)},
        {"use_fp64": True},
        {"vocab_size": 90},
        {"draft_logits": None},
        {"plan": "reference"},
    ]
    for graphs, change in enumerate(changes, start=1):
        for _ in range(2):
            call = {**args, **change}
            cache = call["draft_logits"]
            tokens = compiled(**(call if cache is None else {**call, "draft_logits": same_layout(cache)}))
            call.pop("plan", None)
            assert torch.equal(tokens, oracle(call)[0])
        assert counter.frame_count == graphs


@pytest.mark.parametrize(
    ("device", "plan"), [("cpu", "auto"), pytest.param("cuda", "auto", marks=gpu), pytest.param("cuda", "reference", marks=gpu)]
)
def test_generated_code_neither_clones_nor_copies_the_cache(device: str, plan: str, caplog: pytest.LogCaptureFixture) -> None:
    args = to(device, case(rows=3, steps=2, vocab=513, slots=29))
    expected, expected_cache = oracle(args)
    compiled = torch.compile(dspark_ops.markov_sample_sequential, fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        tokens, code = run_and_get_code(compiled, **args, plan="step" if device == "cuda" and plan == "auto" else plan)
    assert torch.equal(tokens.cpu(), expected) and same_bits(args["draft_logits"].cpu(), expected_cache)
    calls = "\n".join(line for text in code for line in text.splitlines() if "empty_strided" in line and "=" in line)
    assert "(3, 2" in calls, "the buffer of the tokens must be there, or the search finds nothing"
    assert "29, 2, 513" not in calls and "(58, 513" not in calls and "29754" not in calls, "no buffer of the size of the cache"
    assert not any("clone" in line and "arg" in line for text in code for line in text.splitlines())
    assert "assuming every input is mutated" not in caplog.text


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_carry_auto(strict: bool, tmp_path: FilePath) -> None:
    class Drafter(torch.nn.Module):
        def __init__(self, args: Arguments) -> None:
            super().__init__()
            for name in ("markov_w1", "markov_w2", "draft_logits"):
                self.register_buffer(name, args[name].clone())

        def forward(self, base_logits: torch.Tensor, **rest: Any) -> torch.Tensor:
            return dspark_ops.markov_sample_sequential(
                base_logits, markov_w1=self.markov_w1, markov_w2=self.markov_w2, draft_logits=self.draft_logits, **rest
            )

    args = case(rows=3, steps=2, vocab=97)
    given = {name: args[name] for name in ("base_logits", "anchor_ids", "temperature", "seeds", "sample_pos", "idx_mapping")}
    program = torch.export.export(Drafter(args), (), given, strict=strict)
    (node,) = [node for node in program.graph.nodes if node.target is torch.ops.dspark.markov_sample_sequential.default]
    assert "step" not in node.args and "reference" not in node.args
    torch.export.save(program, tmp_path / "drafter.pt2")
    loaded = torch.export.load(tmp_path / "drafter.pt2").module()
    expected, expected_cache = oracle(args)
    assert torch.equal(loaded(**given), expected)
    assert expected_cache is not None and same_bits(loaded.draft_logits, expected_cache)


def _graph(args: Arguments, function: Callable[..., Any] = dspark_ops.markov_sample_sequential) -> torch.fx.GraphModule:
    """The graph that a compiler gets for a call; the compilation ends there."""
    graphs: list[torch.fx.GraphModule] = []

    def capture(graph: torch.fx.GraphModule, _: object) -> None:
        graphs.append(graph)
        raise InterruptedError

    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=capture), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="InterruptedError"):
        compiled(**args)
    return graphs[0]


def _operators(graph: torch.fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function" and "getitem" not in str(node.target))


@pytest.fixture
def cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fake tensors on a GPU of compute capability 9.0, and the stub of a driver that Triton asks for its target."""
    triton = pytest.importorskip("triton")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(guards, "device_reason", lambda device: None)
    monkeypatch.setattr(guards, "block_device_reason", lambda device: None)
    with FakeTensorMode():

        def fake(args: Arguments) -> Arguments:
            return {
                name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if isinstance(x, torch.Tensor) else x
                for name, x in args.items()
            }

        yield fake


def test_the_compiler_sees_two_kernels_a_step(cuda_without_a_gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    graph = _graph({**cuda_without_a_gpu(case(rows=3, steps=2, vocab=97)), "plan": "step"})
    assert _operators(graph) == {"triton_kernel_wrapper_functional": 4, "aten.new_empty.default": 3}
    mutated = [node.kwargs["tensors_to_clone"] for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    assert mutated == [["draft_logits_ptr", "best_key_ptr", "best_token_ptr"], ["tokens_ptr"]] * 2
    assert "assuming every input is mutated" not in caplog.text


def test_inductor_is_asked_once_to_keep_what_every_step_reads(cuda_without_a_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(lowering, "_in_inductor", lambda: True)
    args = cuda_without_a_gpu(case(rows=3, steps=2, vocab=97))
    graph = _graph({**args, "plan": "step"})
    kept = {node for node in graph.graph.nodes if node.target is torch.ops.dspark.keep_layout.default}
    assert len(kept) == sum(isinstance(x, torch.Tensor) for x in args.values()) - 1, "all but the cache"
    launches = [node.kwargs["kwargs"] for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    steps = [launch for launch in launches if "draft_logits_ptr" in launch]
    for name in ("base_logits_ptr", "w1_ptr", "w2_ptr"):
        (source,) = {launch[name] for launch in steps}
        assert source in kept
    assert not any(launch["draft_logits_ptr"] in kept for launch in steps)


def test_the_compiler_sees_one_launch_a_block(cuda_without_a_gpu: Any) -> None:
    graph = _graph(cuda_without_a_gpu(case(rows=3, steps=2, vocab=97)))
    (node,) = [node for node in graph.graph.nodes if node.op == "call_function" and "getitem" not in str(node.target)]
    assert node.target is torch.ops.higher_order.auto_functionalized_v2 and node.args[0] is torch.ops.dspark.sample_block.default
    assert torch.Tag.needs_exact_strides in torch.ops.dspark.sample_block.default.tags
    graph = _graph(cuda_without_a_gpu(case(rows=3, steps=2, vocab=97, cached=False)))
    assert sum("sample_block" in str(node.args) for node in graph.graph.nodes) == 1, "an empty tensor stands for no cache"


def test_without_a_cache_nothing_of_the_users_is_mutated(cuda_without_a_gpu: Any) -> None:
    graph = _graph({**cuda_without_a_gpu(case(rows=3, steps=2, vocab=97, cached=False)), "plan": "step"})
    mutated = {name for node in graph.graph.nodes for name in node.kwargs.get("tensors_to_clone", ())}
    assert mutated == {"best_key_ptr", "best_token_ptr", "tokens_ptr"}


def test_the_compiler_sees_one_operation_that_runs_the_lm_head_beside_the_noise(cuda_without_a_gpu: Any) -> None:
    args = {name: x for name, x in case(rows=3, steps=2, vocab=97).items() if name in ("seeds", "sample_pos", "idx_mapping")}
    args |= {"hidden": torch.zeros(3, 2, 8, dtype=torch.bfloat16), "weight": torch.zeros(97, 8, dtype=torch.bfloat16)}
    given = cuda_without_a_gpu(args)
    beside, in_order = "dspark.linear_beside_noise.default", "triton_kernel_wrapper_functional"
    found = _operators(_graph(given, dspark_ops.lm_head_beside_noise))
    assert found == {beside: 1}
    torch.set_autocast_enabled("cuda", True)  # the context manager asks for a GPU
    try:
        found = _operators(_graph(given, dspark_ops.lm_head_beside_noise))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert found[in_order] == 1 and beside not in found, "autocast decides the dtype of the product"


def test_golden_graph_of_the_fallback() -> None:
    """What Inductor gets: the roundings are arithmetic on bits, the products stand alone, the cache is written once."""
    expecttest = pytest.importorskip("expecttest")
    telling = ("mm", "addmm", "add", "bitwise_or", "index_put", "index_put_", "argmax", "log", "div", "sub", "clone", "copy")
    operators = Counter(
        {
            name: count
            for name, count in _operators(_graph(case(rows=3, steps=2, vocab=97, cached=True))).items()
            if name.split(".")[1] in telling
        }
    )

    class Golden(expecttest.TestCase):
        def runTest(self) -> None:
            self.assertExpectedInline(
                "\n".join(f"{count} {name}" for name, count in sorted(operators.items())),
                """\
16 aten.add.Tensor
3 aten.argmax.default
7 aten.bitwise_or.Scalar
8 aten.bitwise_or.Tensor
2 aten.div.Tensor
1 aten.index_put.default
2 aten.log.default
2 aten.mm.default
2 aten.sub.Tensor""",
            )

    Golden().runTest()


_TWO_PROCESSES = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, dspark_ops
if sys.argv[2] == "untagged":
    torch.compiler.config.cache_key_tag = ""
logits, ids, weights = torch.zeros(2, 1, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(8, 16)
none = dict.fromkeys(("temperature", "seeds", "sample_pos", "idx_mapping"))
print(torch.compile(dspark_ops.markov_sample_sequential, fullgraph=True)(logits, ids, weights, weights, **none).tolist())
"""


@pytest.mark.slow
def test_an_edited_package_meets_no_stale_graph(tmp_path: FilePath) -> None:
    package = FilePath(dspark_ops.__file__).parent
    for copy in ("original", "edited"):
        shutil.copytree(package, tmp_path / copy / "dspark_ops", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "edited" / "dspark_ops" / "reference.py"
    text = source.read_text()
    edited = text.replace("return torch.stack(tokens, dim=1)", "return torch.stack(tokens, dim=1) + 5")
    assert edited != text
    source.write_text(edited)

    def run(copy: str, tag: str) -> str:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache-{tag}"), "PYTHONPATH": ""}
        command = [sys.executable, "-c", _TWO_PROCESSES, str(tmp_path / copy), tag]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert [run("original", "tagged"), run("edited", "tagged")] == ["[[0], [0]]", "[[5], [5]]"]
    # The fault is there to be met: without the tag the edited package gets the graph of the original.
    assert [run("original", "untagged"), run("edited", "untagged")] == ["[[0], [0]]", "[[0], [0]]"]


def test_what_wants_to_see_the_op_sees_it() -> None:
    """Eager calls skip the dispatcher; not where a mode, a trace, a profile or a gradient would miss the op."""
    args = case()
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        dspark_ops.markov_sample_sequential(**args)
    assert seen[0] == "dspark.markov_sample_sequential.default", seen

    with torch.profiler.profile() as profile:
        dspark_ops.markov_sample_sequential(**args)
    assert any(event.key == "dspark::markov_sample_sequential" for event in profile.key_averages())

    graph = make_fx(lambda base: dspark_ops.markov_sample_sequential(**{**args, "base_logits": base}))(args["base_logits"])
    assert any(node.target is torch.ops.dspark.markov_sample_sequential.default for node in graph.graph.nodes)

    weights = args["markov_w1"].float().requires_grad_()
    tokens = dspark_ops.markov_sample_sequential(**{**args, "markov_w1": weights, "markov_w2": args["markov_w2"].float()})
    assert not tokens.requires_grad

    with pytest.raises(RuntimeError, match="dspark::markov_sample_sequential"):
        torch.func.vmap(lambda base: dspark_ops.markov_sample_sequential(**{**args, "base_logits": base}))(args["base_logits"][None])


@every_device
def test_a_write_to_the_cache_is_seen_by_autograd(device: str) -> None:
    """On every plan: kernels write past autograd."""
    args = to(device, case())
    fused = dspark_ops.FusedMarkov(200, 16, 5, device)
    for plan in ("auto", "reference") if device == "cpu" else ("auto", "step", "reference"):
        for function in (dspark_ops.markov_sample_sequential, fused.run):
            version = args["draft_logits"]._version
            function(**args, plan=plan)
            assert args["draft_logits"]._version > version, (plan, function)
