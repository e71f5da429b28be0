"""The report in a real browser: clicked through, by keyboard too, and hostile text never runs.

Needs Playwright and Debian's chromium (`pip install playwright`, `apt-get install chromium`); skipped with the reason
where one is absent. Screenshots are left in pytest's temporary folder, or in $SCREENSHOTS.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from report.compare import compare
from report.page import write_report
from tests.support.runs import TINY, metrics_row, spoken, write_run

api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: requirements/dev.txt")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")

HOSTILE = (
    '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'
    "<svg onload=window.hacked=1>${window.hacked=1}{{hacked}}<!--"
)
SPLIT = "数😀é"  # each is several tokens of the tiny vocabulary


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    """Three steps of two prompts with two samples; step 2 is hostile."""
    path = tmp_path_factory.mktemp("browser")
    groups = {}
    for step, text in ((1, "What is 12*34+56, please?"), (2, HOSTILE), (3, f"How many {SPLIT} are here?")):
        groups[step] = [
            spoken(tokenizer, f"{text} {prompt}", [f"I call {text}", f"It is {sample}"], output=text, code=text,
                   prompt_index=prompt, sample=sample, status=text if step == 2 else "ok")
            for prompt in (0, 1) for sample in (0, 1)
        ]  # fmt: skip
    evaluated = {"eval_avg_at_k": 0.5, "eval_avg_stderr": 0.1, "eval_problems": 64, "eval_k": 1,
                 "eval_pass_at_k": 0.5, "eval_cut": 0.0, "eval_seconds": 2.0}  # fmt: skip
    rows = [metrics_row(1), metrics_row(2, reasons={"correct": 2, HOSTILE: 2}), metrics_row(3, **evaluated)]
    for name in ("run", "other"):
        write_report(write_run(path / name, rows, groups), tokenizer, None, 100)
    compare(path / "run", path / "other", 10, None)
    return path


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def faults():
    return []


@pytest.fixture
def page(browser, folder, faults):
    """The report, opened with the network off; whatever the browser complains of lands in `faults`."""
    context = browser.new_context(viewport={"width": 1360, "height": 900}, offline=True)
    opened = context.new_page()
    opened.set_default_timeout(10_000)
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("request", lambda request: None if request.url.startswith("file:") else faults.append(request.url))
    opened.goto(f"file://{folder}/run/report.html")
    opened.wait_for_selector(".trajectory")
    yield opened
    assert faults == []
    context.close()


def keep(page, name: str, tmp_path: Path) -> None:
    target = Path(os.environ.get("SCREENSHOTS", tmp_path))
    target.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=target / f"{name}.png")


def choose_step(page, step: int) -> None:
    page.select_option("#step", str(step))
    api.expect(page.locator("#found")).to_have_text(re.compile(f"^step {step}:"))


def test_it_opens_at_the_last_step_and_draws_every_chart(page, tmp_path):
    assert page.input_value("#step") == "3"
    assert page.locator(".chart canvas").count() == page.locator(".chart").count() > 10
    assert page.evaluate("scrollY") == 0
    keep(page, "report", tmp_path)


def test_a_group_stands_side_by_side_with_its_calls(page, tmp_path):
    choose_step(page, 1)
    assert page.locator(".trajectory").count() == 2
    first, second = (page.locator(".trajectory").nth(i).bounding_box() for i in (0, 1))
    assert first["y"] == second["y"] and first["x"] < second["x"]
    call = page.locator(".trajectory").first.locator(".call")
    assert "What is 12*34+56, please?" in call.inner_text() and "250 ms" in call.inner_text()
    page.locator("#trajectories").scroll_into_view_if_needed()
    keep(page, "group", tmp_path)


def test_characters_that_tokens_split_are_whole_again(page):
    assert SPLIT in page.locator(".trajectory .tokens").first.inner_text()
    assert SPLIT in page.locator("#groups button").first.inner_text()


def test_hostile_text_is_shown_and_never_runs(page, tmp_path):
    choose_step(page, 2)
    page.locator("details").evaluate_all("all => all.forEach((one) => { one.open = true; })")
    page.hover(".tokens .t >> nth=5")
    assert "<script>window.hacked=1</script>" in page.locator(".trajectory .tokens").first.inner_text()
    assert "onerror" in page.locator(".call").first.inner_text()
    assert "onload" in page.locator("#ledger table.data >> nth=0").inner_text()
    assert page.locator("main img, main svg, main script").count() == 0
    assert page.evaluate("window.hacked") is None
    keep(page, "hostile", tmp_path)


def test_markup_that_did_get_in_would_still_not_run(page, faults):
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked=1\">')")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked=1'}))")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    assert faults and all("Content Security Policy" in fault for fault in faults)
    faults.clear()


def test_tokens_are_coloured_by_what_is_chosen(page):
    choose_step(page, 1)
    tint = "getComputedStyle(document.querySelector('.t.s.l4:not(.c)')).backgroundColor"
    seen = {}
    for value in ("mask", "logprob", "advantage", "none"):
        page.check(f"input[name=colour][value={value}]")
        seen[value] = page.evaluate(tint)
        shown = page.locator(".key:visible").evaluate_all("all => all.map((one) => one.dataset.for)")
        assert shown == ([] if value == "none" else [value])
    assert len(set(seen.values())) == 4
    wrong = page.evaluate("getComputedStyle(document.querySelector('.minus .t.s')).backgroundColor")
    page.check("input[name=colour][value=advantage]")
    assert page.evaluate("getComputedStyle(document.querySelector('.minus .t.s')).backgroundColor") != wrong
    assert page.evaluate("getComputedStyle(document.querySelector('.t.a')).backgroundColor") == "rgba(0, 0, 0, 0)"


def test_entropy_tints_what_was_trained_and_is_told_for_each_token(page):
    choose_step(page, 1)
    page.check("input[name=colour][value=entropy]")
    assert page.locator(".key:visible").evaluate_all("all => all.map((one) => one.dataset.for)") == ["entropy"]
    trained, other = page.locator(".trajectory").nth(0), page.locator(".trajectory").nth(1)
    tints = "all => all.map((one) => getComputedStyle(one).backgroundColor)"
    first = trained.locator(".t.s:not(.c)").evaluate_all(tints)
    assert len(set(first[:8])) == 5  # 0, 0.3, 0.6 .. 2.1 nats: none and four tints
    assert set(other.locator(".t.s:not(.c)").evaluate_all(tints)) == {"rgba(0, 0, 0, 0)"}
    trained.locator(".t.s").nth(2).hover()
    assert "entropy 0.6 nats" in page.locator("#inspector").inner_text()
    other.locator(".t.s").nth(2).hover()
    assert "entropy not recorded" in page.locator("#inspector").inner_text()


def test_the_reason_filter_leaves_the_groups_that_have_it(page):
    options = page.locator("#reason option").all_inner_texts()
    assert options == ["all 4", "correct (2)", "no_box (2)"]
    page.select_option("#reason", "no_box")
    assert page.locator(".trajectory.match").count() == 1
    page.check("#mixed")
    assert page.locator("#found").inner_text() == "step 3: 2 of 2 prompts"


def test_turns_fold(page):
    turn = page.locator(".turn").first
    assert turn.locator(".tokens").first.is_visible()
    turn.locator("summary").first.click()
    assert not turn.locator(".tokens").first.is_visible()


def test_it_can_be_used_by_keyboard_alone(page):
    page.focus("#step-back")
    page.keyboard.press("[")
    api.expect(page.locator("#found")).to_have_text(re.compile("^step 2:"))
    page.keyboard.press("j")
    assert page.locator("#groups [aria-current=true]").evaluate("one => one.prompt") == 1
    page.keyboard.press("k")
    page.locator(".turn .tokens").first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "turn 1  log-probability" in page.locator("#inspector").inner_text()
    page.locator(".plot").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".chart [aria-live]").first.inner_text() == "step 1: training problems 5 %, evaluation, 95 % –"
    page.keyboard.press("Tab")


def test_numbers_of_a_chart_are_there_as_a_table(page):
    figure = page.locator(".chart").first
    figure.get_by_role("button").click()
    assert figure.locator("table.data tbody tr").count() == 3
    assert "50 %" in figure.locator("table.data tbody tr").last.inner_text()


def test_every_control_and_region_has_a_name(page):
    unnamed = page.evaluate("""() => [...document.querySelectorAll('button, select, input, [role=region], [role=img]')]
        .filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length || e.getAttribute('aria-labelledby')))
        .map((e) => e.outerHTML.slice(0, 80))""")
    assert unnamed == []
    headings = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map((e) => +e.tagName[1])")
    assert headings[0] == 1 and all(b - a <= 2 for a, b in itertools.pairwise(headings))


def test_text_has_contrast_in_both_themes(page, tmp_path):
    for theme in ("light", "dark"):
        if page.evaluate("document.documentElement.dataset.theme") != theme:
            page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        ratios = page.evaluate(CONTRAST)
        assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
        keep(page, theme, tmp_path)


CONTRAST = """() => {
  const value = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const light = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => { const [x, y] = [light(value(a)), light(value(b))].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05); };
  const pairs = [["--ink", "--ground"], ["--ink", "--surface"], ["--muted", "--ground"], ["--muted", "--surface"],
    ["--muted", "--sunk"], ["--right", "--surface"], ["--wrong", "--surface"], ["--wrong", "--sunk"],
    ["--accent", "--ground"], ["--ink", "--accent-soft"], ["--ink", "--l1"], ["--ink", "--l2"], ["--ink", "--l3"],
    ["--ink", "--l4"], ["--muted", "--accent-soft"]];
  return Object.fromEntries(pairs.map(([a, b]) => [`${a} on ${b}`, ratio(a, b)]));
}"""


def test_an_address_with_a_step_opens_it(page, folder):
    page.goto("about:blank")
    page.goto(f"file://{folder}/run/report.html#step=1&prompt=1")
    page.wait_for_selector(".trajectory")
    assert page.input_value("#step") == "1"
    assert page.locator("#groups [aria-current=true]").evaluate("one => one.prompt") == 1


def test_the_comparison_draws_both_runs(page, folder, tmp_path):
    page.goto(f"file://{folder}/other/compare.html")
    page.wait_for_selector(".chart canvas")
    assert page.locator(".chart canvas").count() == page.locator(".chart").count() > 10
    assert "mean reward" in page.locator("#table table").inner_text()
    keep(page, "compare", tmp_path)
