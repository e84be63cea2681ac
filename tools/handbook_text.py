#!/usr/bin/env python3
"""handbook_text.py HTML_DIR OUT: the Debian handbook as plain prose.

Follows the book's own "next" links, keeps headings and paragraphs, and drops
what is not prose: navigation, tables of contents, index marks, listings,
tables, figures and links. Paragraphs are separated by blank lines.
"""

import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

# Classes and tags whose whole content is dropped.
DROPPED_CLASSES = {
    "calloutlist", "docnav", "example", "figure", "indexterm",
    "mediaobject", "table", "toc", "url",
}
DROPPED_TAGS = {"head", "pre", "script", "style", "table"}
DROPPED_IDS = {"banner", "title"}

# Tags that end a paragraph where they begin and where they end.
BLOCK_TAGS = {
    "body", "blockquote", "dd", "div", "dl", "dt", "h1", "h2", "h3", "h4",
    "h5", "h6", "li", "ol", "p", "ul",
}
VOID_TAGS = {"area", "br", "col", "hr", "img", "input", "link", "meta"}


class Page(HTMLParser):
    """Collects the paragraphs of one page and the name of the next."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.paragraphs = []
        self.next_page = None
        self._words = []
        self._dropped = 0  # depth inside a dropped element, 0 outside
        self.feed(html)
        self.close()
        self._end_paragraph()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "link" and attrs.get("rel") == "next":
            self.next_page = attrs.get("href")
        if tag in VOID_TAGS:
            return
        if self._dropped or self._is_dropped(tag, attrs):
            self._dropped += 1
        if tag in BLOCK_TAGS:
            self._end_paragraph()

    def handle_startendtag(self, tag, attrs):
        if tag in VOID_TAGS:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        if tag in VOID_TAGS:
            return
        if self._dropped:
            self._dropped -= 1
        if tag in BLOCK_TAGS:
            self._end_paragraph()

    def handle_data(self, data):
        if not self._dropped:
            self._words.append(data)

    @staticmethod
    def _is_dropped(tag, attrs):
        classes = set((attrs.get("class") or "").split())
        return (
            tag in DROPPED_TAGS
            or attrs.get("id") in DROPPED_IDS
            or not DROPPED_CLASSES.isdisjoint(classes)
        )

    def _end_paragraph(self):
        text = " ".join("".join(self._words).split())
        # A dropped link or index mark leaves its spaces behind.
        text = re.sub(r" +(?=[.,;:!?)]+( |$))", "", text)
        self._words.clear()
        if any(c.isalpha() for c in text):
            self.paragraphs.append(text)


def book(folder):
    """The paragraphs of all pages, in the order of the book."""
    seen = set()
    # The first page is the title page: names, licences, table of contents.
    name = Page((folder / "index.html").read_text("utf-8")).next_page
    while name and name not in seen:
        seen.add(name)
        page = Page((folder / name).read_text("utf-8"))
        yield from page.paragraphs
        name = page.next_page


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: handbook_text.py HTML_DIR OUT")
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    if not (folder / "index.html").is_file():
        sys.exit(f"handbook_text: no index.html in {folder}")
    unfinished = out.with_name(out.name + ".part")
    text = "\n\n".join(book(folder)) + "\n"
    unfinished.write_text(text, encoding="utf-8", newline="\n")
    os.replace(unfinished, out)


if __name__ == "__main__":
    main()
