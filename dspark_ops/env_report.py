"""`python -m dspark_ops.env_report`: versions, devices, and each fast path with the reason where it is not available, for a bug report."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Callable

import torch

from . import guards

# What serves a call faster than plain torch, and the predicate that says why it does not on a device.
FAST_PATHS: dict[str, Callable[[torch.device], str | None]] = {
    'one launch a block (plan="block")': guards.block_device_reason,
    'step kernels (plan="step")': guards.device_reason,
    "noise kernel (markov_noise)": guards.device_reason,
    "noise ahead (FusedMarkov.fork_noise, lm_head_beside_noise)": guards.device_reason,
}


def versions() -> dict[str, str]:
    """Versions of the package and of what it runs on, by name.

    >>> versions()["Python"] == platform.python_version()
    True
    """
    try:
        own = importlib.metadata.version("dspark-ops")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed, run from its sources"
    return {
        "dspark_ops": own,
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__ if guards.has_triton() else "not installed",
        "CUDA runtime of torch": torch.version.cuda or "none",
        "HIP runtime of torch": torch.version.hip or "none",
        "GPUs that torch can use": str(torch.cuda.device_count()),
    }


def devices() -> dict[torch.device, str]:
    """The CPU and each GPU that torch can use, with name and compute capability.

    >>> devices()[torch.device("cpu")] == platform.machine()
    True
    """
    found = {torch.device("cpu"): platform.machine()}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = properties.gcnArchName if torch.version.hip else f"compute capability {properties.major}.{properties.minor}"
        found[torch.device("cuda", index)] = f"{properties.name}, {capability}"
    return found


def report() -> str:
    """The environment as Markdown, to paste into a bug report.

    >>> print(report().splitlines()[0])
    ### Environment of dspark_ops
    """
    lines = ["### Environment of dspark_ops", *(f"- {name}: {version}" for name, version in versions().items())]
    for device, name in devices().items():
        lines.append(f"- {device}: {name}")
        lines += [f"  - {path}: {reason(device) or 'available'}" for path, reason in FAST_PATHS.items()]
    lines += [f"- `{name}={value}`" for name, value in sorted(os.environ.items()) if name.startswith("DSPARK_OPS_")]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
