"""The arrows of the design: which module may import which. Read from the syntax tree, so nothing is imported here."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "audit", "configs", "decode", "evaluation", "modeling", "report", "rollout", "run", "sandbox", "startup", "update",
)  # fmt: skip
ANY_OF_OURS = None

# What each may import of ours, itself excepted. A package allows its own modules; one of them that has a rule of its
# own keeps to that.
ALLOWED: dict[str, set[str] | None] = {
    "configs": set(),
    "config": {"configs"},
    "sandbox": set(),
    "tools": {"config", "sandbox"},
    "modeling": {"config"},
    "decode": {"config", "modeling"},
    "decode.interface": set(),
    "rollout": {"config", "decode", "modeling.families"},
    "rollout.records": {"config"},
    "rollout.pages": set(),
    "rollout.scheduler": {"decode.interface", "rollout.pages"},
    "reward": {"config", "rollout.records"},
    "data": {"config", "reward"},
    "update": {"config", "modeling", "rollout.records"},
    "run": {"config", "configs", "rollout.records", "update"},
    "run.files": {"configs"},
    "policy": {"config", "modeling", "rollout.records", "run", "update"},
    "report": {"config", "configs", "run"},
    "evaluation": {"config", "reward", "rollout.records", "run"},
    "audit": {"config", "configs", "decode", "modeling", "rollout", "run", "update.losses"},
    "audit.losses": {"update.losses"},
    "trainer": {"config", "data", "evaluation", "reward", "rollout.records", "run", "startup", "update"},
    "startup": {"config", "configs", "data", "decode", "modeling", "reward", "rollout", "run", "tools", "update"},
    "startup.arguments": {"config"},
    "startup.building": ANY_OF_OURS,
    "startup.rewards": {"config", "configs", "evaluation", "reward", "rollout", "sandbox", "startup", "tools"},
    "main": ANY_OF_OURS,
}  # fmt: skip
# Where heavy libraries may come in.
MAY_IMPORT = {"deepspeed": {"policy", "main", "run.engine_files", "update.teacher"}}
NO_TORCH = (
    "config", "configs", "decode.interface", "report", "reward", "rollout.chat.harmony_prompt",
    "rollout.chat.harmony_turns", "rollout.chat.toolcall", "rollout.episode", "rollout.pages", "rollout.records",
    "rollout.scheduler", "run.checkpoint", "run.console", "run.files", "run.stretches",
    "run.trajectories", "run.writers", "sandbox", "startup.arguments", "tools", "update.groups",
)  # fmt: skip


def sources() -> dict[str, Path]:
    top = {p.stem: p for p in ROOT.glob("*.py")}
    inside = {}
    for path in (p for package in PACKAGES for p in (ROOT / package).rglob("*.py")):
        inside[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return top | inside


SOURCES = sources()


def imports(path: Path) -> set[str]:
    """Dotted names; of `from package import module` the module alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if names <= SOURCES.keys() else names | {node.module}
    return found


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name in SOURCES}


def rule(module: str) -> str:
    return module if module in ALLOWED else module.split(".")[0]


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_arrows_point_one_way(module):
    assert rule(module) in ALLOWED, f"{module} has no rule; add it to the design first"
    allowed = ALLOWED[rule(module)]
    if allowed is ANY_OF_OURS:
        return
    own = module.split(".")[0] if rule(module) in PACKAGES else module
    bad = {name for name in ours(SOURCES[module]) if not {name, name.split(".")[0]} & (allowed | {own})}
    assert not bad


def test_packages_and_top_level_modules_do_not_need_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for module, path in SOURCES.items():
        name = module.split(".")[0]
        graph.setdefault(name, set()).update({other.split(".")[0] for other in ours(path)} - {name})
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_heavy_libraries_stay_where_they_belong(module):
    roots = {name.split(".")[0] for name in imports(SOURCES[module])}
    for library, places in MAY_IMPORT.items():
        assert library not in roots or module in places
    if module in NO_TORCH or module.split(".")[0] in NO_TORCH:
        assert not roots & {"torch", "transformers", "numpy"}


BARE = {"config", "configs", "run.files", "reward", "sandbox"}


@pytest.mark.parametrize("module", sorted(m for m in SOURCES if {m, m.split(".")[0]} & BARE))
def test_these_need_only_the_standard_library(module):
    roots = {name.split(".")[0] for name in imports(SOURCES[module])}
    assert roots <= sys.stdlib_module_names | BARE | {"rollout", "run"}


def test_no_module_shadows_the_standard_library():
    assert not {name for name in SOURCES if "." not in name} & sys.stdlib_module_names


LONGEST = {"config.py": 610}  # lines of a file; config.py declares every setting once


@pytest.mark.parametrize("name", sorted(p.relative_to(ROOT).as_posix() for p in SOURCES.values()))
def test_files_and_functions_stay_small(name):
    text = (ROOT / name).read_text()
    assert text.count("\n") <= LONGEST.get(name, 370), "split the file: one reason to change"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < 50, f"{node.name} is longer than a screen"
