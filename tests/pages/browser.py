"""Pages in a real headless Chromium, with all that they log and request."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
Scheme = Literal["light", "dark"]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A page, its errors and the addresses that it requested."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def start_browser() -> Iterator[Browser]:
    """Start the installed Chromium; without one, skip, but fail in CI."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        message = f"no Chromium on PATH ({', '.join(NAMES)}): make browser installs it as root"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        # Root has no sandbox: https://chromium.googlesource.com/chromium/src/+/main/docs/linux/sandboxing.md
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] * (os.geteuid() == 0))
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Browser, path: Path, *, width: int = 1180, scheme: Scheme = "light") -> Iterator[Opened]:
    """Open a file."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened = Opened(page=context.new_page())
    page = opened.page
    page.on("console", lambda message: opened.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: opened.errors.append(str(error)))
    page.on("dialog", lambda dialog: opened.errors.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.goto(path.as_uri())
    yield opened
    context.close()
