"""The report names what runs and why the rest does not, also where Triton or a GPU is missing."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from dspark_ops import env_report, guards

# An import of a name that is None in sys.modules fails as if the package were not there.
WITHOUT_TRITON = 'import sys; sys.modules["triton"] = None\n'


def run_without_triton(code: str) -> str:
    """Standard output of Python code that runs where Triton cannot be imported."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_versions_and_devices_are_named() -> None:
    lines = env_report.report().splitlines()
    assert {f"- Python: {platform.python_version()}", f"- torch: {torch.__version__}", f"- cpu: {platform.machine()}"} <= set(lines)
    assert sum(line.startswith("- triton: ") for line in lines) == 1


def test_every_fast_path_has_a_status_on_every_device() -> None:
    lines = env_report.report().splitlines()
    for device in env_report.devices():
        reason = guards.device_reason(device) or "available"
        first = next(i for i, line in enumerate(lines) if line.startswith(f"- {device}: ")) + 1
        assert lines[first : first + len(env_report.FAST_PATHS)] == [f"  - {path}: {reason}" for path in env_report.FAST_PATHS]


def test_a_path_without_a_reason_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_report, "devices", lambda: {torch.device("cuda", 0): "a card"})
    monkeypatch.setattr(env_report, "FAST_PATHS", {"one": lambda device: None, "two": lambda device: f"not on {device}"})
    assert "- cuda:0: a card\n  - one: available\n  - two: not on cuda:0" in env_report.report()


def test_environment_variables_of_the_package_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_OPS_SOMETHING", "1")
    assert "- `DSPARK_OPS_SOMETHING=1`" in env_report.report().splitlines()


def test_reports_without_triton() -> None:
    assert "- triton: not installed\n" in run_without_triton('import runpy; runpy.run_module("dspark_ops.env_report", run_name="__main__")')


def test_serves_without_triton_and_says_so() -> None:
    code = """
import torch, dspark_ops
from dspark_ops import guards
logits, ids, weights = torch.zeros(1, 2, 4), torch.zeros(1, dtype=torch.int64), torch.zeros(4, 16)
args = dict(temperature=None, seeds=None, sample_pos=None, idx_mapping=None)
print(dspark_ops.markov_sample_sequential(logits, ids, weights, weights, **args).tolist())
print(guards.device_reason(torch.device("cuda")))
"""
    assert run_without_triton(code) == "[[0, 0]]\nTriton is not installed\n"


@pytest.mark.gpu
def test_every_fast_path_is_available_on_a_gpu() -> None:
    assert env_report.report().count(": available") >= len(env_report.FAST_PATHS)
