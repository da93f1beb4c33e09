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
"""What zensical reads. Documents are at the paths that they have in the repository."""
SITE = STAGE / "html" / "index.html"
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
AS_THEY_ARE = {".html", ".ipynb", ".json", ".png", ".svg"}
"""Files that a browser shows or saves. Other files become pages."""
LANGUAGES = {".j2": "jinja", ".py": "python", ".sh": "bash", ".yaml": "yaml"}
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def files(pattern: str) -> list[Path]:
    """Return the files that match a pattern and that git does not ignore, relative to the repository."""
    command = ["git", "ls-files", "-zco", "--exclude-standard", "--", pattern]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (ROOT / (path := Path(name))).is_file()]


def page_of(path: Path) -> Path:
    """Return the page, or the file, that the site has for what stands at `path` in the repository."""
    if (ROOT / path).is_dir():
        return path / ("README.md" if (ROOT / path / "README.md").exists() else "index.md")
    return path if path.suffix in {*AS_THEY_ARE, ".md"} else path.with_name(f"{path.name}.md")


def text_of(path: Path) -> str:
    """Return the Markdown of a page. Its links are those of the repository."""
    if (ROOT / path).is_dir():
        names = sorted({file.relative_to(path).parts[0] for file in files(f"{path}/*")})
        return f"{NOT_SEARCHED}# {path}\n\n" + "".join(f"* [{name}]({name})\n" for name in names)
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"{NOT_SEARCHED}# {path}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def write_pages() -> None:
    """Write every document and all that it links to."""
    shutil.rmtree(STAGE, ignore_errors=True)
    waiting: list[Path] = files("*.md")
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if (page := page_of(path)) in done:
            continue
        done.add(page)
        (PAGES / page).parent.mkdir(parents=True, exist_ok=True)
        if page.suffix in AS_THEY_ARE:
            shutil.copyfile(ROOT / path, PAGES / page)
            continue
        text = text_of(path)
        links = LINK.findall(text) if (ROOT / path).is_dir() or path.suffix == ".md" else []
        for before, link, after in links:
            target = Path(os.path.normpath(page.parent / link))
            if (ROOT / target).exists():
                waiting.append(target)
                text = text.replace(
                    before + link + after, before + os.path.relpath(page_of(target), page.parent) + after
                )
            elif not link.startswith("http"):  # zensical looks for pages and anchors only
                sys.exit(f"{path}: the link {link} leads nowhere")
        (PAGES / page).write_text(text, encoding="utf-8")


def write_configuration() -> None:
    """Write zensical's configuration, without the lines of documents that do not exist."""
    lines = (ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8").splitlines(keepends=True)
    named = [re.fullmatch(r' *"(\S+\.md)",\n', line) for line in lines]
    kept = [line for line, name in zip(lines, named, strict=True) if name is None or (ROOT / name[1]).exists()]
    (STAGE / "zensical.toml").write_text("".join(kept), encoding="utf-8")


if __name__ == "__main__":
    write_pages()
    write_configuration()
    status = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=STAGE).returncode
    print(f"docs.site: {f'zensical failed ({status})' if status else f'written to {SITE}'}")
    sys.exit(status)
