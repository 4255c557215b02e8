"""Keeps a changed package from meeting graphs that were compiled from an older one.

The caches of torch.compile hash a graph, but not the Python source of the operators that the graph calls, whose bodies are traced after the
look-up. So a hash of the package's sources goes into the part of the cache key that is there for such things.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch.compiler


@functools.cache
def source_hash() -> str:
    """A hash of every Python source of the package, names included.

    >>> len(source_hash())
    64
    """
    digest = hashlib.sha256()
    package = Path(__file__).parent
    # The second is a symbolic link in a source tree, which rglob does not follow.
    for source in sorted({*package.rglob("*.py"), *(package / "inductor").rglob("*.py")}):
        digest.update(str(source.relative_to(package)).encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def extend_cache_key() -> None:
    """Appends the hash to `torch.compiler.config.cache_key_tag`, once; what the user has there stays."""
    tag = f"dspark_ops={source_hash()}"
    if tag not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += tag
