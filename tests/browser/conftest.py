"""A Chromium for the viewer's page. Where there is none, tests fail and say what to install."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, help="folder that gets the pictures of the documentation")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's Chromium, else Playwright's own."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        pytest.fail("needs Playwright: pip install -e '.[browser]'")
    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-lcd-text"])
        except Error as error:
            pytest.fail(f"needs a Chromium: `apt install chromium` or `playwright install chromium`; {error}")
        yield browser
        browser.close()
