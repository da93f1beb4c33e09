"""Hostile input: text for pages, terminals and paths, and a pickle."""

import re
from pathlib import Path

from hypothesis import strategies as st

PIECES = [
    "</script>", "<script>document.title='gone'</script>", "<!--", "-->", "]]>", "<![CDATA[", "</style>", "</title>",
    "</option></select>", "<img src=x onerror=\"document.title='gone'\">", "<svg onload=alert(1)>", "<base href=//x>",
    "<a href=javascript:alert(1)>a</a>", "javascript:alert(1)", "&lt;", "&#0;", '"', "'", "`", "=", "{{ 7 * 7 }}", "${7}",
    "[red]", "[/]", "[/red]", "[link=https://x]a[/link]", ":smile:", "](x)", "|", "$\\foo$", "%s", "{0}", "\\x1b",
    "\x1b[31m", "\x1b]8;;https://x\x07", "\x1b]0;gone\x07", "\x9b31m", "\x07", "\x08", "\r", "\x7f", "\0", "\t", "\n", "\x85",
    "\ud83d", "\udcff", "\u2028", "\u2029", "\u202e", "\u2066", "\u200b", "\u200f", "\ufeff", "\xad", "\U000e0041",
    "../../up", "/etc/passwd", "~", "__proto__", "constructor", "toString", "😀", "größer", "שלום",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), min_size=1, max_size=4).map("".join)

names = texts.map(lambda text: re.sub(r"[\0/]|[\ud800-\udc7f\udd00-\udfff]", "_", text)[:40]).filter(
    lambda name: name.strip(".") != ""
)
"""Names of files and folders. Half a character is a byte that is not UTF-8."""

UNSEEN = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0001-\U000e007f]"
)
"""Characters that control a terminal or the writing direction, or are invisible, except a line break."""


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self):
        return Path.touch, (self.made,)
