"""Tests marked `gpu` are skipped where there is none."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True, scope="module")
def _forget_compilations_of_other_modules() -> None:
    """torch.compile gives up on a function after eight graphs."""
    torch._dynamo.reset()
