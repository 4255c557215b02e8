"""What the README shows runs, and its table of reasons is complete."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import needs_compiler

from dspark_ops import guards

README = (Path(__file__).parent.parent / "README.md").read_text()


@needs_compiler
def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    example, naive_loop = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(example, names)
    assert names["tokens"].shape == (2, 4)
    assert names["cache"].isfinite().all(), "every slot, step and token id is written"
    exec(naive_loop, names)
    assert names["tokens"].shape == (2, 4)
    assert "4 steps, fused" in capsys.readouterr().out


def test_every_reason_is_in_the_table() -> None:
    returns = [node.value for node in ast.walk(ast.parse(inspect.getsource(guards.reference_reason))) if isinstance(node, ast.Return)]
    reasons = [value.value for value in returns if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    assert len(reasons) > 5
    assert [reason for reason in reasons if f"| {reason} |" not in README] == []
