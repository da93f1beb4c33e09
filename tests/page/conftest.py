"""A browser for the pages, where there is one."""

import itertools
import os
import shutil

import pytest

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium: of PATH, or what `playwright install` brought. Without one: skipped, and a failure where CI=true."""
    missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        missing("playwright is not installed (pip install playwright)")
    with (
        sync_playwright() as playwright
    ):  # its loop runs in this thread until the end: other rooms have loops of their own
        try:
            program = next(filter(None, map(shutil.which, PROGRAMS)), None)
            opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except Error as error:
            missing(f"no browser starts ({str(error).splitlines()[0]}); tests/run.sh says how to install one")
        yield opened
        opened.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page and returns its faults: errors of its script, dialogs, requests."""
    number = itertools.count()

    def open_page(html, size=(1280, 900), **options):
        faults, file = [], tmp_path / f"page{next(number)}.html"
        file.write_text(html, encoding="utf-8")
        page = browser.new_page(viewport={"width": size[0], "height": size[1]}, **options)
        page.on("console", lambda message: faults.append(message.text))
        for event in ("pageerror", "dialog"):
            page.on(event, lambda said: faults.append(str(said)))
        page.on("request", lambda request: faults.append(request.url) if request.url != file.as_uri() else None)
        page.goto(file.as_uri())
        return page, faults

    yield open_page
    for context in browser.contexts:
        context.close()
