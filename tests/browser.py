"""A browser for the pages, where there is one."""

import os
import shutil

import pytest

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium: of PATH, or what `playwright install` brought. Without one: skipped, and a failure where CI=true.

    It leaves its event loop running in this thread until it is closed: tests of other rooms have loops of their own.
    """
    missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        missing("playwright is not installed (pip install playwright)")
    with sync_playwright() as playwright:
        try:
            program = next(filter(None, map(shutil.which, PROGRAMS)), None)
            opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except Error as error:
            missing(f"no browser starts ({str(error).splitlines()[0]}); tests/run.sh says how to install one")
        yield opened
        opened.close()
