"""A report as one HTML file that needs no other file and no network.

Only the Markdown that reports are made of: headings, paragraphs, lists, tables, pictures, fenced
code, and lines of HTML, which stay as they are.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 68rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.5rem; border-bottom: 1px solid #ddd; text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
pre { background: #f5f5f5; padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; }
"""
_HEADING = re.compile(r"(#+) (.*)")
_IMAGE = re.compile(r"!\[(.*?)\]\((.*?)\)")
_FENCE = re.compile(r"```\w*\n(.*?)\n```", re.DOTALL)
_INLINE: Sequence[tuple[str, str]] = (
    (r"`([^`]+)`", r"<code>\1</code>"),
    (r"\*\*(.+?)\*\*", r"<strong>\1</strong>"),
    (r"\[(.+?)\]\((.+?)\)", r'<a href="\2">\1</a>'),
)


def convert_to_html(markdown: str, folder: Path, refresh: int = 0) -> str:
    """Convert a report in Markdown, whose pictures lie in a folder, to a page.

    A browser loads it again after ``refresh`` seconds, if that is not 0.
    """
    parts, code = [], {}
    for number, match in enumerate(_FENCE.finditer(markdown)):
        code[f"CODE-{number}"] = f"<pre>{escape(match[1])}</pre>"
        markdown = markdown.replace(match[0], f"CODE-{number}")
    for block in re.split(r"\n\n+", markdown.strip()):
        parts.append(code.get(block) or _convert_block(block, folder))
    title = _convert_inline(markdown.split("\n", 1)[0].lstrip("# "))
    again = f'<meta http-equiv="refresh" content="{refresh}">\n' if refresh else ""
    head = f'<meta charset="utf-8">\n{again}<title>{title}</title>\n<style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en">\n{head}\n' + "\n".join(parts) + "\n</html>\n"


def _convert_block(block: str, folder: Path) -> str:
    lines = block.split("\n")
    if heading := _HEADING.fullmatch(block):
        level = len(heading[1])
        return f"<h{level}>{_convert_inline(heading[2])}</h{level}>"
    if image := _IMAGE.fullmatch(block):
        data = base64.b64encode((folder / image[2]).read_bytes()).decode()
        return f'<img alt="{escape(image[1])}" src="data:image/png;base64,{data}">'
    if block.startswith("| "):
        head, _, *rows = (re.split(r"(?<!\\)\|", line)[1:-1] for line in lines)
        body = [_format_row("td", cells) for cells in rows]
        return "\n".join(["<table>", _format_row("th", head), *body, "</table>"])
    if block.startswith("- "):
        return "\n".join(
            ["<ul>", *(f"<li>{_convert_inline(line[2:])}</li>" for line in lines), "</ul>"]
        )
    return block if block.startswith("<") else f"<p>{_convert_inline(' '.join(lines))}</p>"


def _format_row(tag: str, cells: Sequence[str]) -> str:
    return (
        f"<tr>{''.join(f'<{tag}>{_convert_inline(cell.strip())}</{tag}>' for cell in cells)}</tr>"
    )


def _convert_inline(text: str) -> str:
    text = escape(text.replace(r"\|", "|"), quote=False)
    for pattern, by in _INLINE:
        text = re.sub(pattern, by, text)
    return text
