"""The arrows of the design: which module may import which. Read from the syntax tree, so nothing is imported here."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "audit", "distillation", "evaluation", "modeling", "objectives", "report", "rollout", "runtime", "sandbox",
    "settings", "startup",
)  # fmt: skip
ANY_OF_OURS = None

# What each may import of ours, itself excepted. A package allows its own modules; one of them that has a rule of its
# own keeps to that.
ALLOWED: dict[str, set[str] | None] = {
    "settings": set(),
    "settings.schema": set(),
    "settings.loss": {"settings.schema"},
    "settings.model": {"settings.schema"},
    "settings.teacher": {"settings.schema"},
    "settings.watch": {"settings.schema"},
    "config": {"settings"},
    "sandbox": set(),
    "tools": {"config", "sandbox"},
    "modeling": {"config"},
    "modeling.lora": {"config"},
    "rollout": {"config", "modeling"},
    "rollout.records": set(),
    "rollout.pages": set(),
    "boxes": set(),
    "reward": {"boxes", "config", "rollout.records"},
    "data": {"config", "reward", "rollout.records"},
    "objectives": set(),
    "objectives.losses": {"config"},
    "objectives.corrections": {"config", "objectives.losses"},
    "objectives.measures": set(),
    "objectives.groups": {"config", "reward", "rollout.records"},
    "objectives.minibatch": {"config", "data", "objectives.groups", "rollout.records"},
    "objectives.entropies": {"objectives.minibatch"},
    "objectives.reference": set(),
    "distillation": set(),
    "distillation.teacher": {"modeling"},
    "distillation.weights": set(),
    "update": {
        "config",
        "data",
        "modeling",
        "objectives.corrections",
        "objectives.losses",
        "objectives.measures",
    },
    "runtime": set(),
    "runtime.badsteps": {"config", "runtime.files", "update"},
    "runtime.files": {"settings.schema"},
    "runtime.infra": {"config", "rollout.records"},
    "runtime.interruption": set(),
    "runtime.random_state": set(),
    "runtime.ranks": {"rollout.records", "runtime.files"},
    "runtime.schedule": {"config"},
    "runtime.tensorfiles": {"runtime.checksums"},
    "runtime.zero_settings": {"config"},
    "policy": {
        "config",
        "modeling",
        "objectives.reference",
        "rollout.records",
        "runtime.random_state",
        "runtime.tensorfiles",
        "runtime.zero_settings",
    },
    "checkpoint": {"config", "runtime.checksums"},
    "report": {"config", "rollout.records", "runtime.files", "settings.schema", "settings.watch"},
    "evaluation": set(),
    "evaluation.estimators": set(),
    "evaluation.scores": {"boxes", "config", "evaluation.estimators", "reward", "rollout.records", "runtime.files"},
    "evaluation.treatments": {"checkpoint", "config", "evaluation.scores", "rollout.records", "runtime.ranks"},
    "audit": set(),
    "audit.recompute": {"audit.losses", "report.settings", "report.trajectories", "runtime.files"},
    "audit.losses": set(),
    "audit.second_opinion": {"config", "report.trajectories"},
    "trainer": {
        "checkpoint",
        "config",
        "data",
        "evaluation.scores",
        "objectives.entropies",
        "objectives.groups",
        "objectives.minibatch",
        "report",
        "reward",
        "rollout.records",
        "runtime.badsteps",
        "runtime.files",
        "runtime.infra",
        "runtime.interruption",
        "runtime.ranks",
        "runtime.schedule",
        "update",
    },
    "startup": set(),
    "startup.arguments": set(),
    "startup.parts": {"config", "modeling", "rollout.records"},
    "startup.budget": {"modeling", "rollout.records", "startup.parts"},
    "startup.check": {"config", "data", "modeling", "reward", "rollout.records", "startup.budget", "startup.parts"},
    "startup.inputs": {
        "config",
        "data",
        "distillation.teacher",
        "modeling",
        "rollout",
        "runtime.files",
        "settings.schema",
        "tools",
        "trainer",
    },
    "startup.run_folder": {
        "checkpoint",
        "config",
        "distillation.teacher",
        "modeling",
        "runtime.files",
        "settings.schema",
        "startup.inputs",
    },
    "startup.building": ANY_OF_OURS,
    "main": ANY_OF_OURS,
}
# Where heavy libraries may come in.
MAY_IMPORT = {"deepspeed": {"policy", "main", "distillation.weights"}}
NO_TORCH = (
    "boxes", "checkpoint", "config", "objectives.groups", "report", "reward", "rollout.episode", "rollout.harmony",
    "rollout.harmony_prompt", "rollout.pages", "rollout.records", "rollout.scheduler", "rollout.toolcall",
    "runtime.files", "runtime.schedule", "sandbox", "settings", "startup.arguments", "tools",
)  # fmt: skip


def sources() -> dict[str, Path]:
    top = {p.stem: p for p in ROOT.glob("*.py")}
    inside = {
        f"{p.parent.name}.{p.stem}".removesuffix(".__init__"): p for d in PACKAGES for p in (ROOT / d).glob("*.py")
    }
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


BARE = {"config", "runtime.files", "boxes", "reward", "settings", "sandbox"}


@pytest.mark.parametrize("module", sorted(m for m in SOURCES if {m, m.split(".")[0]} & BARE))
def test_these_need_only_the_standard_library(module):
    roots = {name.split(".")[0] for name in imports(SOURCES[module])}
    assert roots <= sys.stdlib_module_names | BARE | {"rollout"}


def test_no_module_shadows_the_standard_library():
    assert not {name for name in SOURCES if "." not in name} & sys.stdlib_module_names


@pytest.mark.parametrize("name", sorted(p.relative_to(ROOT).as_posix() for p in SOURCES.values()))
def test_files_and_functions_stay_small(name):
    text = (ROOT / name).read_text()
    assert text.count("\n") <= 300, "split the file: one reason to change"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < 50, f"{node.name} is longer than a screen"
