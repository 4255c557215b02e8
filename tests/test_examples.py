"""The examples of drafters and naive loops work on a CPU, refuse what they cannot serve, and notice when eager and compiled disagree."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import needs_compiler
from safetensors.torch import save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "compiled_drafter.py"
W1, W2, LM_HEAD = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "lm_head.weight"


def python(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs Python on the package of this checkout, with temporary files in `folder`."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *args], check=False, env=env, capture_output=True, text=True, timeout=600)


def checkpoint(path: Path, replace: dict[str, Tensor | None] | None = None) -> Path:
    """A drafter file of 64 tokens, rank 16 and hidden size 32, with tensors replaced, added or (None) left out."""
    generator = torch.Generator().manual_seed(0)
    shapes = {W1: (64, 16), W2: (64, 16), LM_HEAD: (64, 32)}
    tensors: dict[str, Tensor | None] = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    tensors |= replace or {}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return path


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.stem}_example", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return module(SCRIPT)


@pytest.fixture
def run(example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """The example's `main` without the compiler: its compiled drafter is the eager one, until a test plants something else."""
    monkeypatch.setattr(example, "compile_drafter", lambda drafter: drafter)
    monkeypatch.setattr(example, "count_graph_breaks", lambda drafter, batch: 0)
    monkeypatch.setattr(example, "SIZES", {"cpu": (64, 16, 32)})
    monkeypatch.setattr(example.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    yield lambda *args: example.main([*args, "--device", "cpu", "--rows", "1", "2", "7"])
    matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


def agrees(out: str, rows: list[int], new_graphs: list[int], steps: int) -> None:
    """Asserts that the output of a run without FILE has its facts."""
    listed = ", ".join(map(str, rows))
    for fact in (
        "device:     cpu",
        f"torch {torch.__version__}",
        "plan:       reference, plain torch operations, because the tensors are on a cpu device",
        f"agreement:  yes: tokens and cached logits of {sum(rows)} rows",
        "logits are compared bit for bit",
        "graph breaks: 0",
        f"compilations: 2 over R = {listed}",
    ):
        assert fact in out
    assert len(re.findall(rf"request \d, slot \d+, temperature \d\.\d: \d+ ->(?: \d+){{{steps}}}$", out, re.MULTILINE)) == 3
    table = re.findall(r"^ *(\d+)  +[\d.]+  +[\d.]+  +[\d.]+  +[\d.]+  +(\d)  +yes$", out, re.MULTILINE)
    assert table == [(str(row), str(graphs)) for row, graphs in zip(rows, new_graphs, strict=True)]


@pytest.mark.slow  # make demo runs it as well
def test_the_example_runs_and_eager_and_compiled_agree(tmp_path: Path) -> None:
    done = python(tmp_path, str(SCRIPT), "--device", "cpu", "--steps", "2", "--rows", "1", "2", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    agrees(done.stdout, rows=[1, 2, 7], new_graphs=[1, 1, 0], steps=2)
    assert len(list(tmp_path.glob("compiled-drafter-*/model.safetensors"))) == 1


@pytest.mark.slow
def test_a_file_of_any_weights_is_served_in_any_order_of_batches(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = {W1: (1009, 48), W2: (1009, 48), LM_HEAD: (1009, 96)}
    path = checkpoint(tmp_path / "any.safetensors", {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()})
    done = python(tmp_path, str(SCRIPT), str(path), "--device", "cpu", "--steps", "2", "--rows", "16", "1", "3", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "logits may differ by the rounding" in done.stdout
    assert "compilations: 2 over R = 16, 1, 3, 2" in done.stdout


def test_a_missing_tensor_ends_the_script_with_its_name_and_no_traceback(tmp_path: Path) -> None:
    done = python(tmp_path, str(SCRIPT), str(checkpoint(tmp_path / "broken.safetensors", {W2: None})), "--device", "cpu")
    assert done.returncode == 2
    assert f"error: {W2} is missing" in done.stderr
    assert "Traceback" not in done.stderr


MATRIX = torch.zeros(64, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        ({W1: None}, f"{W1} is missing"),
        ({LM_HEAD: None}, f"{LM_HEAD} is missing"),
        ({W1: None, "markov_w1.weight": MATRIX}, f"{W1} is missing .* which has .*markov_w1.weight"),
        ({W1: MATRIX[0]}, f"{W1} must be a matrix, got shape \\[16\\]"),
        ({LM_HEAD: torch.zeros(0, 32)}, f"{LM_HEAD} must be a matrix, got shape \\[0, 32\\]"),
        ({W2: MATRIX[:, :8].contiguous()}, f"{W2} must be \\[64, 16\\] BF16"),
        ({W2: MATRIX.float()}, f"{W2} must be \\[64, 16\\] BF16"),
        ({LM_HEAD: torch.zeros(63, 32)}, f"{LM_HEAD} must have as many rows as {W1}, 64"),
        ({LM_HEAD: torch.zeros(64, 32, dtype=torch.int8)}, f"{LM_HEAD} must be BF16 or F16 or F32, got I8"),
        ({"markov_head.gate_proj.weight": MATRIX}, "markov_head.gate_proj.weight .* gated or recurrent"),
    ],
)
def test_a_file_that_is_no_plain_drafter_is_refused_by_the_name_of_the_tensor(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, replace: dict[str, Tensor | None], message: str
) -> None:
    assert run(str(checkpoint(tmp_path / "broken.safetensors", replace))) == 2
    assert re.search(message, capsys.readouterr().err)


def test_what_is_no_safetensors_file_is_refused(run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pickled = tmp_path / "pickled.bin"
    torch.save({W1: MATRIX}, pickled)
    for path, message in (
        (tmp_path / "nowhere", "does not exist"),
        (pickled, "cannot be read as a safetensors file"),
        (tmp_path, "cannot be read"),
    ):
        assert run(str(path)) == 2
        assert re.search(f"error: {re.escape(str(path))} {message}", capsys.readouterr().err)


def test_equal_runs_end_well(run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run() == 0
    assert run(str(checkpoint(tmp_path / "any.safetensors"))) == 0
    assert capsys.readouterr().err == ""


def spoiled(spoil: Callable[[Tensor, list[Tensor], Tensor], Tensor]) -> Callable[[Any], Callable[..., Tensor]]:
    """A planted `compile_drafter`, whose result has its tokens or its cache spoiled."""

    def compile_drafter(drafter: Any) -> Callable[..., Tensor]:
        def call(*batch: Tensor) -> Tensor:
            return spoil(drafter.draft_logits, list(batch), drafter(*batch))

        return call

    return compile_drafter


def other_tokens(cache: Tensor, batch: list[Tensor], tokens: Tensor) -> Tensor:
    return tokens ^ 1


def no_tokens(cache: Tensor, batch: list[Tensor], tokens: Tensor) -> Tensor:
    return torch.full_like(tokens, -1)


def other_cache(cache: Tensor, batch: list[Tensor], tokens: Tensor) -> Tensor:
    cache[batch[3][-1], -1, -1] += 8.0
    return tokens


def no_cache(cache: Tensor, batch: list[Tensor], tokens: Tensor) -> Tensor:
    cache.fill_(-torch.inf)
    return tokens


def nan_cache(cache: Tensor, batch: list[Tensor], tokens: Tensor) -> Tensor:
    cache[batch[3], 0, 0] = torch.nan
    return tokens


def foreign_slots(cache: Tensor, batch: list[Tensor], tokens: Tensor) -> Tensor:
    cache[cache[:, 0, 0].isinf()] = 0.0
    return tokens


@pytest.mark.parametrize("exact", [True, False], ids=["grid", "file"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_tokens, r"disagreement: R = 1, row 0, step 0: eager drew token \d+ and compiled \d+, whose keys are .* apart"),
        (no_tokens, "disagreement: R = 1, compiled drew tokens outside the vocabulary"),
        (other_cache, "disagreement: R = 1, row 0, step 4: 1 cached logits differ"),
        (no_cache, "disagreement: R = 1, row 0, step 0: 64 cached logits differ"),
        (nan_cache, "disagreement: R = 1, row 0, step 0: 1 cached logits differ"),
        (foreign_slots, "disagreement: R = 1, compiled wrote to a slot of the cache that belongs to no request"),
    ],
)
def test_a_planted_disagreement_is_told_and_ends_with_status_1(
    run: Callable[..., int],
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    exact: bool,
    spoil: Callable[[Tensor, list[Tensor], Tensor], Tensor],
    message: str,
) -> None:
    monkeypatch.setattr(example, "compile_drafter", spoiled(spoil))
    assert run(*([] if exact else [str(checkpoint(tmp_path / "any.safetensors"))])) == 1
    said = capsys.readouterr()
    assert re.search(message, said.err)
    assert "agreement:  NO" in said.out


def test_only_keys_too_close_to_tell_excuse_another_token(example: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = example.Weights(*(torch.randn(64, n, generator=generator).bfloat16() for n in (16, 16, 32)))
    drafter = example.make_drafter(weights, num_slots=4, num_steps=3, generator=generator)
    drafter.temperature.zero_()
    batch = example.make_batch(drafter, 1, generator)
    eager = example.draft(drafter, drafter, batch)
    slot, winner = batch.slots[0], eager.tokens[0, 1]
    runner_up = eager.cache[slot, 1].float().index_fill(0, winner, -torch.inf).argmax()

    tokens, cache = eager.tokens.clone(), eager.cache.clone()
    tokens[0, 1] = runner_up
    cache[slot, 2] += 1.0  # the last step has another past by then, so that its logits say nothing
    compiled = example.Block(tokens, cache)
    eager.cache[slot, 1, runner_up] = compiled.cache[slot, 1, runner_up] = eager.cache[slot, 1, winner]
    assert example.compare(drafter, batch, eager, compiled, exact=False) == ([], 1)
    problems, excused = example.compare(drafter, batch, eager, compiled, exact=True)  # greedy, bit for bit: the lowest id wins a tie
    assert (len(problems), excused) == (1, 0)

    eager.cache[slot, 1, runner_up] = compiled.cache[slot, 1, runner_up] = eager.cache[slot, 1, winner] - 4.0
    problems, excused = example.compare(drafter, batch, eager, compiled, exact=False)
    assert (len(problems), excused) == (1, 0)
    assert f"eager drew token {winner} and compiled {runner_up}" in problems[0]


# In a process of its own: the example resets the compiler, which other tests share.
PLANTED_IN_THE_COMPILER = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("example", sys.argv[1])
example = sys.modules["example"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
example.SIZES = {"cpu": (64, 16, 32)}
example.compile_drafter = lambda drafter: torch.compile(drafter, backend="eager")
rows = ["--device", "cpu", "--rows", "2", "1", "7"]
print("status as it is", example.main(rows))

mark_requests, example.mark_requests = example.mark_requests, lambda batch: None
print("status with unmarked requests", example.main(rows))

example.mark_requests = mark_requests
forward = example.Drafter.forward
def broken(self, *batch):
    tokens = forward(self, *batch)
    torch._dynamo.graph_break()
    return tokens + 0
example.Drafter.forward = broken
print("status with a graph break", example.main(rows))
"""


@pytest.mark.slow
def test_more_compilations_and_graph_breaks_are_counted_and_end_with_status_1(tmp_path: Path) -> None:
    done = python(tmp_path, "-c", PLANTED_IN_THE_COMPILER, str(SCRIPT))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"status .*", done.stdout) == ["status as it is 0", "status with unmarked requests 1", "status with a graph break 1"]
    assert "disagreement: 3 compilations over the batches, more than 2" in done.stderr
    assert "disagreement: the drafter has 1 graph breaks" in done.stderr


def test_help_names_the_tensors(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run("--help")
    assert end.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for name in (W1, W2, LM_HEAD, "--rows", "--steps", "--device", "--seed"):
        assert name in said


# ---- The example of a naive loop -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def naive() -> Iterator[ModuleType]:
    """The module; the switch that it sets is put back."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    yield module(ROOT / "examples" / "fuse_naive_loop.py")
    matmul.allow_bf16_reduced_precision_reduction = before


SMALL = ["--device", "cpu", "--rows", "3", "--steps", "2", "--vocab", "97", "--rank", "16"]


@needs_compiler
def test_a_naive_loop_is_fused_and_draws_the_same_tokens(
    naive: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((6.0, 1.5))
    monkeypatch.setattr(naive, "milliseconds", lambda function, args: next(times))
    assert naive.main(SMALL) == 0
    out = capsys.readouterr().out
    assert "cpu: R = 3, K = 2, V = 97, rank 16, bf16" in out
    rows = re.findall(r"^(Inductor|with the pass) +(\d) +(\d+) +(\d\.\d{3})  0 of 6$", out, re.MULTILINE)
    assert [(name, loops, ms) for name, loops, _, ms in rows] == [("Inductor", "0", "6.000"), ("with the pass", "1", "1.500")]
    assert all(int(launches) > 0 for _, _, launches, _ in rows)
    assert "the pass makes a block 4.00 times as fast" in out


def test_other_tokens_and_a_loop_that_is_not_fused_end_with_status_1(
    naive: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def off_by_one(*args: Tensor) -> tuple[Tensor, Tensor]:
        tokens, logits = naive.sample_block_tokens(*args)
        return tokens + 1, logits

    def other_logits(*args: Tensor) -> tuple[Tensor, Tensor]:
        tokens, logits = naive.sample_block_tokens(*args)
        return tokens, logits + 1

    monkeypatch.setattr(naive, "milliseconds", lambda function, args: 1.0)
    for function, loops, problem in (
        (off_by_one, 1, "with the pass: tokens or logits are not those of eager code"),
        (other_logits, 1, "with the pass: tokens or logits are not those of eager code"),
        (naive.sample_block_tokens, 0, "the pass fused no loop"),
    ):
        monkeypatch.setattr(naive, "compiled", lambda args, options, function=function, loops=loops: (function, loops, 1))
        assert naive.main(SMALL) == 1
        assert problem in capsys.readouterr().err
