"""`python docs/screenshots.py FOLDER` draws inspect.png from the page in a folder of the demo (Chromium)."""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

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
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(64).save(HERE / "inspect.png", optimize=True)  # 64 colours take a third of the bytes


if __name__ == "__main__":
    main()
