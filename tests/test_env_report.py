"""The report names what runs and why the rest does not, also where Triton or a GPU is missing."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from dspark_ops import env_report, guards


def test_versions_and_devices_are_named() -> None:
    lines = env_report.report().splitlines()
    assert {f"- Python: {platform.python_version()}", f"- torch: {torch.__version__}", f"- cpu: {platform.machine()}"} <= set(lines)
    assert sum(line.startswith("- triton: ") for line in lines) == 1


def test_every_fast_path_has_a_status_on_every_device() -> None:
    lines = env_report.report().splitlines()
    for device in env_report.devices():
        reason, block_reason = (of(device) or "available" for of in (guards.device_reason, guards.block_device_reason))
        first = next(i for i, line in enumerate(lines) if line.startswith(f"- {device}: ")) + 1
        assert lines[first : first + len(env_report.FAST_PATHS)] == [
            f"  - {path}: {block_reason if 'block' in path else reason}" for path in env_report.FAST_PATHS
        ]


def test_a_path_without_a_reason_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_report, "devices", lambda: {torch.device("cuda", 0): "a card"})
    monkeypatch.setattr(env_report, "FAST_PATHS", {"one": lambda device: None, "two": lambda device: f"not on {device}"})
    assert "- cuda:0: a card\n  - one: available\n  - two: not on cuda:0" in env_report.report()


def test_environment_variables_of_the_package_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_OPS_SOMETHING", "1")
    assert "- `DSPARK_OPS_SOMETHING=1`" in env_report.report().splitlines()


def test_reports_without_triton() -> None:
    # An import of a name that is None in sys.modules fails as if the package were not there.
    script = 'import runpy, sys; sys.modules["triton"] = None; runpy.run_module("dspark_ops.env_report", run_name="__main__")'
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "- triton: not installed" in run.stdout.splitlines()


@pytest.mark.gpu
def test_every_fast_path_is_available_on_a_gpu() -> None:
    without_block = torch.cuda.get_device_capability() != (9, 0)
    assert env_report.report().count(": available") >= len(env_report.FAST_PATHS) - without_block
