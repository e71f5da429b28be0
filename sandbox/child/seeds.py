"""Random numbers of a program: `random` and numpy's global state follow the call's seed, and so does default_rng().

So a replay of a trajectory prints the same. Left out: os.urandom, secrets and uuid, which promise real randomness.
"""

from __future__ import annotations

import random
import sys
from types import ModuleType
from typing import Any


def seed(value: int) -> None:
    """Seeds `random` now, numpy.random now or when the program imports it."""
    random.seed(value)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        _seed_numpy(numpy_random, value)
    else:
        sys.meta_path.insert(0, _SeedAtImport(value))


def _seed_numpy(numpy_random: ModuleType, value: int) -> None:
    numpy_random.seed(value % 2**32)
    # An unseeded default_rng() draws its entropy here.
    numpy_random.bit_generator.randbits = random.Random(value).getrandbits


class _SeedAtImport:
    """A finder that lets the usual ones find numpy.random and seeds it once it is loaded."""

    def __init__(self, value: int):
        self._value = value

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "numpy.random":
            return None
        sys.meta_path.remove(self)
        spec = sys.meta_path[-1].find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_seed(module: ModuleType) -> None:
                load(module)
                _seed_numpy(module, self._value)

            vars(spec.loader)["exec_module"] = load_and_seed
        return spec
