"""Exported programs keep the op, decide its plan when they run, and give the bits of eager code wherever they are loaded."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import HALF, gpu, needs_compiler, same_bits
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

import dspark_ops

pytestmark = [
    needs_compiler,
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),  # torch's own, when it copies a program
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),  # torch's own, when it loads one
]
ROOT = Path(__file__).resolve().parent.parent
OP = torch.ops.dspark.markov_sample_sequential.default
every_device = pytest.mark.parametrize("device", [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=gpu)])
every_kind = pytest.mark.parametrize(("sampled", "cached"), [(True, True), (True, False), (False, True), (False, False)])


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("export_drafter_example", ROOT / "examples" / "export_drafter.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo looks there for the globals of a function, which a strict export traces
    spec.loader.exec_module(module)
    return module


_PLAIN_PACKAGE = """
import tempfile, torch
program = torch.export.export(torch.nn.Linear(8, 8, device="cuda"), (torch.zeros(2, 8, device="cuda"),))
with tempfile.TemporaryDirectory() as folder:
    torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/plain.pt2"))
"""


@functools.cache
def _signal_of_a_plain_package() -> int:
    """The signal that ends a process which loads the package of a plain layer for a GPU, or 0."""
    return max(0, -subprocess.run([sys.executable, "-c", _PLAIN_PACKAGE], capture_output=True, check=False).returncode)


def _needs_packages(device: str) -> None:
    if device == "cuda" and (signal := _signal_of_a_plain_package()):
        pytest.skip(f"AOTInductor does not work here: to load the package of torch.nn.Linear ends the process by signal {signal}")


def python(*args: str) -> str:
    """What a Python process on the package of this checkout prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run([sys.executable, *args], check=False, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _plan(program: ExportedProgram) -> str:
    """The plan that the one node of the op carries, in a graph as exported or in a functional one."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function" and OP in (node.target, *node.args[:1])]
    assert len(nodes) == 1
    (node,) = nodes
    plans = {argument.name: argument.default_value for argument in OP._schema.arguments} | node.kwargs
    plans |= {argument.name: given for argument, given in zip(OP._schema.arguments, node.args, strict=False)}
    return plans["plan"]


def _equals_eager(example: ModuleType, call: Callable[..., Tensor], cache: Tensor | None, drafter: Any, sampled: bool) -> None:
    """A call gives the tokens of the drafter, and fills the cache with its logits, for every R."""
    device = drafter.lm_head.device
    for rows in (1, 2, 7, 16):
        batch = example.make_batch(rows, HALF, device, sampled=sampled)
        found = []
        for function, written in ((drafter, drafter.draft_logits), (call, cache)):
            if written is not None:
                written.fill_(-7.0)
            tokens = function(*batch)
            found.append((tokens.clone(), None if written is None else written.clone()))
        (expected, expected_cache), (tokens, filled) = found
        assert torch.equal(tokens, expected), rows
        assert tokens.unique().numel() > 1, "one token everywhere could be equal by chance"
        if filled is not None:
            assert expected_cache is not None and same_bits(filled, expected_cache), rows
            assert (filled[batch.slots] != -7.0).any() and (filled == -7.0).any(), "written where it should be, and nowhere else"


@every_device
@every_kind
@pytest.mark.parametrize("strict", [False, True])
def test_programs_serve_every_batch_and_decide_the_plan_when_they_run(
    example: ModuleType, device: str, sampled: bool, cached: bool, strict: bool
) -> None:
    drafter = example.Drafter(HALF, device, cached=cached)
    program = example.export(drafter, example.make_batch(3, HALF, device, sampled=sampled), strict=strict)
    for kept in (program, program.run_decompositions()):
        assert _plan(kept) == "auto"
        module = kept.module()
        _equals_eager(example, module, module.draft_logits if cached else None, drafter, sampled)


_LOAD = """
import sys, torch, dspark_ops
results = []
for name in sys.argv[2:]:
    drafter = torch.export.load(f"{sys.argv[1]}/{name}.pt2").module()
    tokens = [drafter(*batch) for batch in torch.load(f"{sys.argv[1]}/{name}.batches")]
    results.append((tokens, getattr(drafter, "draft_logits", None)))
torch.save(results, f"{sys.argv[1]}/results")
"""


@every_device
def test_a_saved_program_gives_the_same_in_a_new_process(example: ModuleType, device: str, tmp_path: Path) -> None:
    expected = {}
    for sampled in (True, False):
        for cached in (True, False):
            drafter = example.Drafter(HALF, device, cached=cached)
            program = example.export(drafter, example.make_batch(3, HALF, device, sampled=sampled))
            for kind, kept in (("exported", program), ("decomposed", program.run_decompositions())):
                name = f"{kind}-{sampled}-{cached}"
                torch.export.save(kept, tmp_path / f"{name}.pt2")
                batches = [example.make_batch(rows, HALF, device, sampled=sampled) for rows in (1, 7)]
                torch.save([tuple(batch) for batch in batches], tmp_path / f"{name}.batches")
                expected[name] = batches, drafter
    assert not any(drafter.draft_logits.isfinite().any() for _, drafter in expected.values() if drafter.draft_logits is not None)
    python("-c", _LOAD, str(tmp_path), *expected)
    results = torch.load(tmp_path / "results")
    for (tokens, cache), (batches, drafter) in zip(results, expected.values(), strict=True):
        assert all(torch.equal(found, drafter(*batch)) for found, batch in zip(tokens, batches, strict=True))
        assert (cache is None) == (drafter.draft_logits is None)
        if cache is not None:
            assert same_bits(cache, drafter.draft_logits) and cache.isfinite().any()


_LOAD_PACKAGE = """
import sys, torch
package = torch._inductor.aoti_load_package(f"{sys.argv[1]}/package.pt2")
cache, batches = torch.load(f"{sys.argv[1]}/inputs")
package.load_constants({"draft_logits": cache}, check_full_update=False, user_managed=True)
torch.save(([package(*batch) for batch in batches], cache), f"{sys.argv[1]}/results")
assert "dspark_ops" not in sys.modules
"""


@every_device
@pytest.mark.slow
@every_kind
def test_a_package_of_aotinductor_gives_the_same(example: ModuleType, device: str, sampled: bool, cached: bool, tmp_path: Path) -> None:
    _needs_packages(device)
    drafter = example.Drafter(HALF, device, cached=cached)
    program = example.export(drafter, example.make_batch(3, HALF, device, sampled=sampled))
    if cached:
        way = example.of_package(program, tmp_path / "package.pt2")
        _equals_eager(example, way.call, way.cache, drafter, sampled)
    else:
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
        _equals_eager(example, torch._inductor.aoti_load_package(path), None, drafter, sampled)


@every_device
@pytest.mark.slow
def test_a_package_of_aotinductor_needs_no_dspark_ops(example: ModuleType, device: str, tmp_path: Path) -> None:
    _needs_packages(device)
    drafter = example.Drafter(HALF, device)
    program = example.export(drafter, example.make_batch(3, HALF, device))
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
    batches = [example.make_batch(rows, HALF, device) for rows in (1, 7)]
    torch.save((drafter.draft_logits, [tuple(batch) for batch in batches]), tmp_path / "inputs")
    python("-c", _LOAD_PACKAGE, str(tmp_path))
    tokens, cache = torch.load(tmp_path / "results")
    assert all(torch.equal(found, drafter(*batch)) for found, batch in zip(tokens, batches, strict=True))
    assert same_bits(cache, drafter.draft_logits) and cache.isfinite().any()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_a_program_exported_on_a_cpu_takes_the_kernels_on_a_gpu(example: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = example.export(example.Drafter(HALF, "cpu"), example.make_batch(3, HALF, "cpu"))
    moved = move_to_device_pass(program, device)
    launches: list[object] = []
    for module_of, name in ((dspark_ops.ops, "launch_steps"), (dspark_ops.block, "launch_block")):
        launch = getattr(module_of, name)
        monkeypatch.setattr(module_of, name, lambda call, *scratch, launch=launch: (launches.append(call), launch(call, *scratch))[1])
    module = moved.module()
    _equals_eager(example, module, module.draft_logits, example.Drafter(HALF, device), sampled=True)
    assert len(launches) == 2 * 4, "eager and the program, four batches each"


@pytest.mark.parametrize("decomposed", [False, True])
def test_programs_refuse_wrong_arguments(example: ModuleType, decomposed: bool) -> None:
    """Sizes by the guards of export, which knows those of the example; dtypes, which it does not check, by the op in its own words."""
    drafter, batch = example.Drafter(HALF, "cpu"), example.make_batch(3, HALF, "cpu")
    program = example.export(drafter, batch)
    module = (program.run_decompositions() if decomposed else program).module()
    for change, guard in (
        ({"anchor_ids": torch.zeros(4, dtype=torch.int64)}, r"anchor_ids.size\(\)\[0\] == hidden.size\(\)\[0\]"),
        ({"sample_pos": torch.zeros(3, 5, dtype=torch.int64)}, r"sample_pos.size\(\)\[1\] == 4"),
        ({"seeds": torch.zeros(25, dtype=torch.int64)}, r"seeds.size\(\)\[0\] == 24"),
    ):
        with pytest.raises(AssertionError, match=guard):
            module(*batch._replace(**change))
    with pytest.raises(TypeError, match=r"^seeds must be torch.int64, got torch.int32"):
        module(*batch._replace(seeds=batch.seeds.int()))
    assert torch.equal(module(*batch), drafter(*batch)), "a refused call leaves a program that works"


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_of_a_wrong_call_raises_its_error_when_it_runs(strict: bool) -> None:
    class Wrong(torch.nn.Module):
        def forward(self, logits: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            none = dict.fromkeys(("temperature", "seeds", "sample_pos", "idx_mapping"))
            return dspark_ops.markov_sample_sequential(logits, torch.cat([ids, ids]), weights, weights, **none)

    arguments = torch.zeros(2, 1, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(8, 16)
    program = torch.export.export(Wrong(), arguments, strict=strict)
    for module in (program.module(), program.run_decompositions().module(), torch.compile(program.module(), backend="aot_eager")):
        with pytest.raises(ValueError, match=r"^anchor_ids must be \[R\] with R of base_logits = 2, got shape \(4,\)"):
            module(*arguments)


def test_the_example_agrees_and_says_so(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * len(example.BATCHES) and all(line.endswith(" agrees with eager") for line in lines[1:])


def test_the_example_notices_a_program_that_disagrees(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(name: str, program: ExportedProgram) -> Any:
        way = of_program(name, program)
        return way._replace(call=lambda *batch: way.call(*batch).add_(name == "exported program"))

    of_program = example.of_program
    monkeypatch.setattr(example, "of_program", planted)
    assert example.main(["--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert said.count("exported program DISAGREES") == 4 and said.count("after run_decompositions agrees") == 4


@every_device
@pytest.mark.slow
def test_the_example_builds_a_package(example: ModuleType, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    _needs_packages(device)
    assert example.main(["--device", device, "--aoti"]) == 0
    assert capsys.readouterr().out.count("AOTInductor package agrees with eager") == 4
