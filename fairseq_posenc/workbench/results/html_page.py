"""Converts a report to a single HTML file that needs no other files and no network."""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.treeprocessors import Treeprocessor

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.5rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
img { max-width: 100%; }
pre { background: #f5f5f5; padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; }
"""
_PICTURE = re.compile(r'(?<= src=")[^":/]+\.png(?=")')  # a name without a folder or scheme
_SAFE_URL = re.compile(r"\s*(https?:|#|[^:]*$)", re.IGNORECASE)  # also fragments, relative paths


class _UnsafeLinkRemover(Treeprocessor):
    """Removes links with unsafe schemes, such as ``javascript:``, and keeps their text.

    Reports contain names and texts of users, whose HTML ``markdown.escape`` has made harmless.
    """

    def run(self, root: Element) -> None:
        for element in root.iter():
            for name in ("href", "src"):
                # Browsers decode entities, as in ``java&#115;cript:``, before they follow a link.
                if not _SAFE_URL.match(html.unescape(element.get(name, ""))):
                    del element.attrib[name]


def convert_to_html(text: str, folder: Path) -> str:
    """Convert a report in Markdown to an HTML page, with the PNG files of its folder embedded."""

    def embed(match: re.Match[str]) -> str:
        encoded = base64.b64encode((folder / match[0]).read_bytes()).decode()
        return f"data:image/png;base64,{encoded}"

    converter = Markdown(extensions=["fenced_code", "tables"])
    # Processors of higher priority make the links, and run before it.
    converter.treeprocessors.register(_UnsafeLinkRemover(converter), "safe_links", priority=0)
    body = _PICTURE.sub(embed, converter.convert(text))
    title = re.search(r"<h1>(.*?)</h1>", body)
    head = f'<meta charset="utf-8">\n<title>{title[1] if title else ""}</title>\n'
    return f'<!DOCTYPE html>\n<html lang="en">\n{head}<style>{_STYLE}</style>\n{body}\n</html>\n'
