"""``python -m tools.report_image`` takes the pictures of docs/images: the example request's report, light and dark.

Needs Chromium (make browser). A picture holds the digest of the page's code and its first words; tests/pages compares
them.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tempfile
from datetime import UTC, datetime
from html import unescape
from pathlib import Path

from PIL import Image, PngImagePlugin

from optimizer.catalog import load
from optimizer.performance.calibration import load as load_calibration
from optimizer.recommend import recommend
from optimizer.report.answer import read_answer
from optimizer.report.page import render
from tests.pages.browser import Scheme, open_page, start_browser

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "images"
PICTURES: dict[Scheme, Path] = {"light": FOLDER / "report.png", "dark": FOLDER / "report-dark.png"}
WIDTH, HEIGHT = 1100, 1600
# A picture holds these of its page.
CODE_KEY, WORDS_KEY = "page-code", "page-words"


def code_digest() -> str:
    """Digest of all that the page is made by."""
    files = sorted(path for path in (ROOT / "optimizer" / "report").iterdir() if path.suffix in (".py", ".j2", ".css"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def example_answer() -> str:
    """Recommend's JSON for the example request."""
    return json.dumps(recommend(ROOT / "examples" / "request.yaml", load(), load_calibration()).to_dict())


def first_words(page: str) -> str:
    """Words of a page's answer, gauges and tiles. What is below ages with the prices from day to day."""
    parts = re.findall(r"<h1>.*?</h1>|<div class=\"gauges\">.*?</dl>", page, re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", " ".join(parts))).split())


def main() -> None:
    """Write the pictures."""
    FOLDER.mkdir(exist_ok=True)
    answer = read_answer(example_answer())
    page = render(answer, now=datetime.now(UTC))
    about = PngImagePlugin.PngInfo()
    about.add_text(CODE_KEY, code_digest())
    about.add_itxt(WORDS_KEY, first_words(page))
    with tempfile.TemporaryDirectory() as folder, start_browser() as browser:
        file = Path(folder) / "report.html"
        file.write_text(page, encoding="utf-8")
        for scheme, path in PICTURES.items():
            with open_page(browser, file, width=WIDTH, scheme=scheme) as opened:
                opened.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
                picture = opened.page.screenshot()
            colours = Image.open(io.BytesIO(picture)).convert("RGB").quantize(96)
            colours.save(path, optimize=True, pnginfo=about)


if __name__ == "__main__":
    main()
