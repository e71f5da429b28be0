"""What README and docs name exists: links, anchors, paths of files, configs and scripts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "sandbox/README.md", ROOT / "benchmarks/RESULTS.md", *ROOT.glob("docs/*.md")]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<![\w./-])((?:[\w.-]+/)+[\w.-]*\.(?:py|json|sh|txt|md)|(?:[\w-]+/)+)(?![\w*/{])")
FOLDERS = {p.name for p in ROOT.iterdir() if p.is_dir()}
MADE = ("data/", "runs/", "checkpoints/", "trajectories/", "bad_steps/")  # by programs, not in the repository


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_are_named_exist(page):
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text())
    named = {path for path in PATH.findall(text) if path.split("/")[0] in FOLDERS and not path.startswith(MADE)}
    missing = sorted(path for path in named if not (ROOT / path).exists())
    assert not missing


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    assert len((ROOT / "benchmarks/RESULTS.md").read_text().splitlines()) <= 200
