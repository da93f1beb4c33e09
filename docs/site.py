"""Build the documentation site: `python -m docs.site` writes `build/site/html`. It fails if a link leads nowhere.

Documents link to files of the repository, as on GitHub. The site has a page for each of them: a document is its own page; a
program becomes a page with its source, a folder a list of its files. So the site needs no network and no repository on the web.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAGE = ROOT / "build" / "site"
PAGES = STAGE / "pages"
"""The documents as zensical reads them, at the paths that they have in the repository."""
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
AS_THEY_ARE = {".html", ".ipynb", ".json", ".png", ".svg"}
"""Files that a browser shows or saves. Other files become pages."""
LANGUAGES = {".j2": "jinja", ".py": "python", ".sh": "bash", ".yaml": "yaml"}
NOT_A_DOCUMENT = "---\nsearch:\n  exclude: true\n---\n\n"


def tracked(*patterns: str) -> list[Path]:
    """Return what git tracks and matches a pattern, relative to the repository."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S607
    return [path for name in listed.stdout.split("\0") if name and (ROOT / (path := Path(name))).is_file()]


def page_of(path: Path) -> Path:
    """Return where the site has what stands at `path`. Both are relative to the repository."""
    if (ROOT / path).is_dir():
        return path / ("README.md" if (ROOT / path / "README.md").exists() else "index.md")
    return path if path.suffix in {*AS_THEY_ARE, ".md"} else path.with_name(f"{path.name}.md")


def listing(folder: Path) -> str:
    names = sorted({path.relative_to(folder).parts[0] for path in tracked(f"{folder}/*")})
    return f"# {folder}\n\n" + "".join(f"* [{name}]({name})\n" for name in names)


def text_of(path: Path) -> str:
    """Return the Markdown of a page, with the links that it has in the repository."""
    if (ROOT / path).is_dir():
        return NOT_A_DOCUMENT + listing(path)
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"{NOT_A_DOCUMENT}# {path}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def stage() -> None:
    """Write every document and all that it links to into `PAGES`."""
    shutil.rmtree(STAGE, ignore_errors=True)
    waiting = tracked("*.md")
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        page = page_of(path)
        if page in done:
            continue
        done.add(page)
        (PAGES / page).parent.mkdir(parents=True, exist_ok=True)
        if page.suffix in AS_THEY_ARE:
            shutil.copyfile(ROOT / path, PAGES / page)
            continue
        here = path if (ROOT / path).is_dir() else path.parent

        def on_the_site(link: re.Match[str], here: Path = here, page: Path = page) -> str:
            target = Path(os.path.normpath(here / link[2]))
            if ":" in link[2] or not (ROOT / target).exists():
                return link[0]  # of the web, or left for zensical to complain about
            waiting.append(target)
            return link[1] + os.path.relpath(page_of(target), page.parent) + link[3]

        text = text_of(path)
        (PAGES / page).write_text(LINK.sub(on_the_site, text) if "````" not in text else text, encoding="utf-8")
    shutil.copyfile(ROOT / "docs" / "zensical.toml", STAGE / "zensical.toml")


if __name__ == "__main__":
    stage()
    sys.exit(subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=STAGE).returncode)
