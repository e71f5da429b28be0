"""One self-contained HTML file from a template, scripts, styles and data blocks.

Invariants: nothing is loaded from outside; text of a run enters through autoescaping or as compressed data, never as
markup; a content security policy names the hash of each script of ours, so that no other script could run.
The chart library is uPlot (`vendor/uplot`, MIT, unchanged from its npm release 1.6.32): 51 KB, where plotly's bundle
has 4.8 MB and bokeh's 1.3 MB.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

HERE = Path(__file__).parent
UPLOT = HERE / "vendor" / "uplot"


def render(template: str, scripts: Sequence[str], blobs: dict[str, str], **values: Any) -> str:
    """scripts: names in assets/, after uPlot and base.js; blobs: id -> text of `report.blobs.pack`."""
    loader = jinja2.FileSystemLoader(HERE / "templates")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    sources = [_text(UPLOT / "uPlot.iife.min.js")]
    sources.append("\n".join(_text(HERE / "assets" / name) for name in ("base.js", "charts.js", *scripts)))
    styles = [UPLOT / "uPlot.min.css", HERE / "assets" / "style.css", HERE / "assets" / "browser.css"]
    return environment.get_template(template).render(
        policy=_policy(sources), style=Markup("\n".join(map(_text, styles))), blobs=list(blobs.items()),
        scripts=[Markup(source) for source in sources], **values,
    )  # fmt: skip


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip("\n")


def _policy(sources: Sequence[str]) -> str:
    hashes = [base64.b64encode(hashlib.sha256(s.encode("utf-8")).digest()).decode("ascii") for s in sources]
    scripts = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
