"""`python docs/screenshots.py FOLDER` draws inspect.png and report.png from the pages in a folder of the demo (Chromium)."""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    with sync_playwright() as playwright:
        program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        page = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"]).new_page(
            viewport={"width": 1240, "height": 860}
        )
        page.goto((folder / "tokens.html").as_uri())
        page.wait_for_selector("article .t")
        save(page, "inspect.png")
        page.set_viewport_size({"width": 1240, "height": 720})
        page.goto((folder / "report" / "report.html").as_uri())
        page.evaluate("document.getElementById('curves').scrollIntoView()")
        page.locator(".u-over").first.hover()
        save(page, "report.png")


def save(page: Page, name: str) -> None:
    """Save a screenshot with 64 colours, which takes a third of the bytes."""
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(64).save(HERE / name, optimize=True)


if __name__ == "__main__":
    main()
