"""Compile options and the backend: what they add to what is there, and what they refuse."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import grid, needs_compiler
from naive_loops import indexed
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from dspark_ops.inductor import backend, compile_options
from dspark_ops.inductor.fuse_loop import Found, FuseLoops, record
from dspark_ops.inductor.options import SLOT, Passes

ROOT = Path(__file__).resolve().parent.parent


def test_the_options_hold_the_pass_and_nothing_else() -> None:
    options = compile_options()
    assert options.keys() == {SLOT} and isinstance(options[SLOT], FuseLoops)


@pytest.mark.parametrize("mode", torch._inductor.list_mode_options())
def test_the_options_of_a_mode_are_there(mode: str) -> None:
    options = compile_options(mode)
    assert isinstance(options.pop(SLOT), FuseLoops)
    assert options == torch._inductor.list_mode_options()[mode]


def test_your_options_win_over_those_of_the_mode() -> None:
    assert compile_options("reduce-overhead")["triton.cudagraphs"] is True
    options = compile_options("reduce-overhead", epilogue_fusion=False, **{"triton.cudagraphs": False})
    assert options["triton.cudagraphs"] is False and options["epilogue_fusion"] is False
    assert torch._inductor.list_mode_options()["reduce-overhead"]["triton.cudagraphs"] is True, "the mode itself stays as it is"


def test_an_unknown_mode_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"^mode must be one of default, .*reduce-overhead, .* or None, got 'fast'$"):
        compile_options("fast")


@pytest.mark.parametrize(("name", "hint"), [("max_autotun", "did you mean .*max_autotune"), ("zzzz", "list_options")])
def test_an_unknown_option_is_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"^options must be known to Inductor .*, got '{name}'; .*{hint}"):
        compile_options(**{name: True})


class Tagged(CustomGraphPass):
    """A pass that notes its tag in a list when it runs."""

    def __init__(self, ran: list[str], tag: str, uuid: str | None = "tagged") -> None:
        self.ran, self.tag, self.id = ran, tag, uuid

    def __call__(self, graph: Graph) -> None:
        self.ran.append(self.tag)

    def uuid(self) -> str | None:
        return self.id


def _loop_graph(ran: list[str]) -> Graph:
    """A graph that notes when the loop-fusing pass comes to it: the pass begins with dead code."""

    class Noting(Graph):
        def eliminate_dead_code(self, *args: Any, **kwargs: Any) -> bool:
            ran.append("fusion")
            return super().eliminate_dead_code(*args, **kwargs)

    graph = Noting()
    graph.output(())
    return graph


def test_a_pass_that_is_there_runs_first() -> None:
    ran: list[str] = []
    first, second = Tagged(ran, "first"), Tagged(ran, "second")
    for taken, tags in (
        (first, ["first"]),
        (lambda graph: ran.append("function"), ["function"]),
        ([first, second], ["first", "second"]),
        ((second, first), ["second", "first"]),
        (Passes([second]), ["second"]),
    ):
        ran.clear()
        compile_options(**{SLOT: taken})[SLOT](_loop_graph(ran))
        assert ran == [*tags, "fusion"]


def test_a_pass_in_the_configuration_is_kept_and_your_own_replaces_it() -> None:
    ran: list[str] = []
    with torch._inductor.config.patch({SLOT: Tagged(ran, "configured")}):
        inherited, own = compile_options(), compile_options(**{SLOT: Tagged(ran, "own")})
    for options, tag in ((inherited, "configured"), (own, "own")):
        ran.clear()
        options[SLOT](_loop_graph(ran))
        assert ran == [tag, "fusion"]


def test_the_pass_is_there_once_however_often_the_options_are_made() -> None:
    for options in (compile_options(), compile_options(**{SLOT: Tagged([], "first")})):
        ran: list[str] = []
        compile_options(**options)[SLOT](_loop_graph(ran))
        assert ran == ["fusion"]


@pytest.mark.parametrize(("taken", "kind"), [(3, "int"), ([FuseLoops(), "pass"], "str")])
def test_what_cannot_be_called_is_refused(taken: object, kind: str) -> None:
    with pytest.raises(TypeError, match=f"^{SLOT} must be a callable, a list of them or None, got {kind}: .*remove it"):
        compile_options(**{SLOT: taken})


def test_graphs_are_cached_by_the_ids_of_all_passes_and_not_where_one_has_none() -> None:
    def uuid(taken: object) -> Any:
        return compile_options(**{SLOT: taken})[SLOT].uuid()

    fusion = FuseLoops().uuid()
    assert fusion and uuid(Tagged([], "a", "a")) == ("a", fusion) != uuid(Tagged([], "a", "b"))
    assert uuid([Tagged([], "a", "a"), Tagged([], "a", None)]) is None
    assert uuid(lambda graph: None) is None


# ---- The backend -----------------------------------------------------------------------------------------------------------------------------


def _args() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    base, w1, w2 = (grid(*shape, generator=generator, dtype=torch.bfloat16) for shape in ((3, 2, 97), (97, 16), (97, 16)))
    return [base, torch.tensor([5, 6, 7]), w1, w2]


def _fuses(chosen: Any, **options: Any) -> None:
    torch._dynamo.reset()
    args = _args()
    with record() as found, torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        tokens = torch.compile(indexed, backend=chosen, fullgraph=True, **options)(*args)
    assert torch.equal(tokens, indexed(*args)) and found == [Found(2, None)]


@needs_compiler
def test_the_backend_fuses_and_takes_options_of_your_own() -> None:
    ran: list[str] = []
    _fuses(backend, options={SLOT: Tagged(ran, "own")})
    assert ran == ["own"]


@needs_compiler
def test_the_backend_takes_a_mode() -> None:
    _fuses(backend, mode="max-autotune-no-cudagraphs")


@needs_compiler
def test_the_installed_backend_has_a_name() -> None:
    if "dspark" not in importlib.metadata.entry_points(group="torch_dynamo_backends").names:
        pytest.skip("the package is not installed")
    _fuses("dspark")


def test_the_folder_itself_is_no_module() -> None:
    done = subprocess.run([sys.executable, "-c", "import inductor"], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: import dspark_ops.inductor, not inductor")


def test_the_wheel_has_the_package_and_the_entry_point(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    for name in ("dspark_ops", "inductor"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(tmp_path / "source")]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert {f"dspark_ops/inductor/{path.name}" for path in (ROOT / "inductor").glob("*.py")} <= set(names)
    assert "dspark = dspark_ops.inductor:backend" in entry_points
