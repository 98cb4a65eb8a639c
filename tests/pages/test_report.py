"""The report in a real browser: it loads, asks nobody for anything, and everybody can read it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, Page

from optimizer.report.answer import read_answer
from optimizer.report.page import render
from optimizer.report.run import read_run
from tests.pages.browser import Scheme, open_page, start_browser
from tests.pages.demo_run import demo_lines, demo_plan
from tools.report_image import CODE_KEY, PICTURES, WORDS_KEY, code_digest, example_answer, first_words

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
# WCAG 2.1, 1.4.3: https://www.w3.org/TR/WCAG21/#contrast-minimum
LEAST_CONTRAST = 4.5
HOSTILE = "</script></style><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with start_browser() as started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the example request."""
    text = example_answer()
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.with_name("plans.json").write_text(text, encoding="utf-8")
    answer = read_answer(text)
    page = render(answer, now=NOW)
    path.write_text(page, encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "scheme"), [(1180, "light"), (400, "dark")])
def test_loads_alone_and_fits_the_screen(browser: Browser, report: Path, width: int, scheme: Scheme) -> None:
    with open_page(browser, report, width=width, scheme=scheme) as opened:
        page = opened.page
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.errors == []
        assert opened.requests == [report.as_uri()]
        shown = page.locator(".chart svg:visible")
        assert shown.count() == 1  # cost against time
        assert all((box := chart.bounding_box()) and box["x"] + box["width"] <= width for chart in shown.all())
        page.set_viewport_size({"width": 320, "height": 600} if width < 1000 else {"width": 760, "height": 600})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert _serious(page) == []
        # axe does not look at text in SVG.
        assert _contrasts(page) and min(_contrasts(page)) >= LEAST_CONTRAST


def _serious(page: Page) -> list[tuple[str, list[str]]]:
    """Findings of axe that keep people from reading."""
    return [
        (found["id"], [node["html"] for node in found["nodes"]])
        for found in Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        if found["impact"] in ("serious", "critical")
    ]


def _contrasts(page: Page) -> list[float]:
    """Contrast of each colour of text in the charts against the page."""
    paper, *inks = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, ...new Set([...document.querySelectorAll('.chart text')]"
        ".map(text => getComputedStyle(text).fill).filter(fill => fill !== 'none'))]"
    )
    bright = _luminance(paper)
    pairs = [sorted((bright, _luminance(ink))) for ink in inks]
    return [(lighter + 0.05) / (darker + 0.05) for darker, lighter in pairs]


def _luminance(colour: str) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-relative-luminance"""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_marks_say_what_they_are_and_lead_to_their_row(browser: Browser, report: Path) -> None:
    with open_page(browser, report) as opened:
        page = opened.page
        page.locator(".chart.wide a[href='#plan-1']").hover()
        plan = read_answer(report.with_name("plans.json").read_text(encoding="utf-8")).plan
        words = f"{plan.node_count} × {plan.instance_type}, {plan.purchase.option} in"
        assert page.locator("#tip").inner_text().startswith(words)
        # By keyboard: the first mark after the introduction, its tip, its row.
        page.locator(".chart.wide a").first.focus()
        name = page.locator("#tip").inner_text()
        page.keyboard.press("Enter")
        row = page.locator("tr:target")
        assert row.is_visible()
        assert name.split(",")[0] in row.inner_text()
        # A mark of the front leads into details that were closed.
        page.locator(".chart.wide a[href='#front-1']").focus()
        page.keyboard.press("Enter")
        assert page.locator("#front-1").is_visible()


def test_prints_on_white_with_all_details(browser: Browser, report: Path) -> None:
    with open_page(browser, report, scheme="dark") as opened:
        page = opened.page
        page.evaluate(
            "addEventListener('beforeprint', () => window.open_details = document.querySelectorAll"
            "('details[open]').length)"
        )
        assert page.pdf().startswith(b"%PDF-")
        assert page.evaluate("window.open_details") == page.locator("details:not(.long)").count() > 1
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        # A4 without its margins: the wide charts, scaled.
        page.set_viewport_size({"width": 688, "height": 960})
        page.evaluate("document.querySelectorAll('details:not(.long)').forEach(one => { one.open = true; })")
        assert page.locator(".chart.wide:visible").count() == 1 and page.locator(".chart.narrow:visible").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 688


def test_a_run_of_hostile_names_is_text_and_fits(browser: Browser, tmp_path: Path) -> None:
    plan = demo_plan(job={"model": HOSTILE}, node={"gpu": HOSTILE}, calibration={"source": HOSTILE, "rows": 0})
    path = tmp_path / "report.html"
    answer = read_answer(plan.to_json())
    run = read_run(demo_lines("interrupted"), words=[HOSTILE])
    page = render(answer, now=NOW, run=run)
    path.write_text(page, encoding="utf-8")
    with open_page(browser, path, width=400) as opened:
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 400
        assert opened.page.locator(".chart svg:visible").count() == 2  # the loss too
        breaks = opened.page.get_by_label("Interruptions and failures").inner_text()
        for cause in ("spot/instance-action", "Connection reset by peer", "killed"):
            assert cause in breaks
        opened.page.locator(".chart.narrow [aria-label^='this run']").hover()
        assert " USD" in opened.page.locator("#tip").inner_text()
        assert _serious(opened.page) == []
        assert min(_contrasts(opened.page)) >= LEAST_CONTRAST
        assert HOSTILE in opened.page.locator("h1").inner_text()
        assert opened.page.locator("script").count() == 1
        assert opened.page.locator("img").count() == 0
        assert opened.errors == []
        assert opened.requests == [path.as_uri()]


@pytest.mark.parametrize("path", PICTURES.values(), ids=PICTURES)
def test_the_pictures_are_of_this_page_and_answer(report: Path, path: Path) -> None:
    words = first_words(report.read_text(encoding="utf-8"))
    assert "MFU" in words and "95% within" in words, "the tiles and the gauges are among them"
    with Image.open(path) as picture:
        assert picture.info[CODE_KEY] == code_digest(), "python -m tools.report_image takes them anew"
        assert picture.info.get(WORDS_KEY) == words, "python -m tools.report_image takes them anew"
    assert path.stat().st_size < 200_000
