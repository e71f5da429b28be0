"""Which folders of sys.path the sandboxed programs may read."""

from __future__ import annotations

import os
import sys


def library_paths() -> list[str]:
    """Where modules are found: the standard library and installed packages, not the project's folders and scripts."""
    stdlib = os.path.dirname(os.__file__)
    return [path for path in sys.path if path == stdlib or path.endswith(".zip") or _holds_packages(path)]


def _holds_packages(folder: str) -> bool:
    if os.path.basename(folder) in ("lib-dynload", "site-packages", "dist-packages"):
        return True
    return os.path.isdir(folder) and any(name.endswith(".dist-info") for name in os.listdir(folder))
