"""Makes ``docs/reference/*.md`` from the signatures and docstrings of classes and functions.

Sources are parsed, not imported, so the page needs none of the packages that they import.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from fairseq_posenc.errors import UserError

ROOT = Path(__file__).parents[2]
_END = "Letters in shapes: [encodings](../encodings/README.md)."
_WIDTH = 100  # characters of a line of code
_HEADING = re.compile(r"(Args|Attributes|Returns|Raises):")
_ITEM = re.compile(r"([\w.*]+): (.*)", re.DOTALL)
_COMMA = re.compile(r", (?![^\[(]*[\])])")  # not in brackets
_DEFAULT = re.compile(r"^(\w+: [^=]+)=")
_ROLE = re.compile(r":\w+:`~?([^`]+)`")
Definition = ast.ClassDef | ast.FunctionDef


# Of each page, the names by module: classes, functions and methods, separated by spaces.
_PAGES = {
    "library": {
        "fairseq_posenc.api": "StackPositions SelfAttention CrossAttention Cache LayerPositions "
        "PositionEncoding",
        "fairseq_posenc.specs": "parse",
        "fairseq_posenc.registry": "names get options",
        "fairseq_posenc.errors": "UserError",
    },
    "transformers": {"fairseq_posenc.hf": "set_positions read_positions"},
    "fairseq": {"fairseq_posenc.workbench.translation.translator": "Translator Hypothesis"},
}


def format_files(folder: Path) -> dict[Path, str]:
    """Format every page of ``docs/reference`` in Markdown; what precedes the first name is kept.

    Raises:
        UserError: a module does not define a class or function that is listed for it.
    """
    paths = {folder / f"{name}.md": names for name, names in _PAGES.items()}
    return {path: _format_page(path, names) for path, names in paths.items()}


def _format_page(path: Path, names_by_module: Mapping[str, str]) -> str:
    parts = [path.read_text(encoding="utf-8").partition("\n## ")[0] if path.exists() else ""]
    for module, names in names_by_module.items():
        for name in names.split():
            parts += _format_definition(_find(module, name), module)
    return "\n\n".join(part.strip("\n") for part in [*parts, _END]) + "\n"


@cache
def _parse(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _find(module: str, name: str) -> Definition:
    """Find a definition in a module, or in the module that it imports the name from."""
    for node in _parse(module).body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _find(str(node.module), name)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    raise UserError(f"{module} has no {name}, which docs/generate/reference.py lists")


def _format_definition(node: Definition, module: str, owner: str = "") -> Iterator[str]:
    """Format a function, or a class with its public methods, in paragraphs.

    Args:
        node: its definition.
        module: where it is imported from; "" for a method that follows its class.
        owner: the class of a method; "" for others.
    """
    name = f"{owner}.{node.name}" if owner else node.name
    yield f"## {name}" if module else f"### {name}"
    parts = node.body if isinstance(node, ast.ClassDef) else []
    methods = [part for part in parts if isinstance(part, ast.FunctionDef)]
    constructors = [method for method in methods if method.name == "__init__"]
    for call in [node] if isinstance(node, ast.FunctionDef) else constructors:
        yield from _format_signature(call, name, is_method=bool(owner) or call is not node)
    yield from _format_docstring(node)
    if module:
        yield f"From `{module}`."
    for method in methods:
        is_inner = str(ast.get_docstring(method)).startswith(("See ", "Override "))
        if not (method.name.startswith("_") or is_inner):
            yield from _format_definition(method, "", name)


def _format_signature(node: ast.FunctionDef, name: str, *, is_method: bool) -> Iterator[str]:
    """Format a call as Python, on several lines if it is long; nothing for a property."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if "property" in decorators:
        return
    skipped = 1 if is_method and "staticmethod" not in decorators else 0  # self or cls
    written = _COMMA.split(ast.unparse(node.args).replace("'", '"'))
    arguments = [_DEFAULT.sub(r"\1 = ", argument) for argument in written][skipped:]
    returns = "" if node.returns is None or node.name == "__init__" else ast.unparse(node.returns)
    end = ") -> " + returns.strip("'") if returns else ")"  # quoted in the body of its own class
    if len(line := f"{name}({', '.join(arguments)}{end}") > _WIDTH:
        line = "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), end])
    yield f"```py\n{line}\n```"


def _format_docstring(node: Definition | ast.Module) -> Iterator[str]:
    """Format a docstring in Google's style: paragraphs, examples, and lists of its sections."""
    heading = ""
    paragraphs = re.split(r"\n{2,}", ast.get_docstring(node) or "")
    for lines in (paragraph.split("\n") for paragraph in paragraphs if paragraph):
        if match := _HEADING.fullmatch(lines[0]):
            heading, lines = match[1], lines[1:]
        text = "\n".join(lines)
        if heading and lines and lines[0].startswith("    "):
            yield _format_section(heading, lines)
        elif text.startswith(">>> "):
            yield f"```pycon\n{text}\n```"
        else:
            yield _to_markdown(" ".join(lines))


def _format_section(heading: str, lines: Iterable[str]) -> str:
    """Format the body of a section: a list of its names, or a sentence without names."""
    entries: list[str] = []
    for line in lines:
        if line.startswith("     "):  # it continues the entry above
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line.strip())
    matches = [_ITEM.fullmatch(entry) for entry in entries]
    if heading in ("Returns", "Raises") or not all(matches):
        return f"**{heading}**: {_to_markdown(' '.join(entries))}"
    items = (f"- `{match[1]}`: {_to_markdown(match[2])}" for match in matches if match)
    return "\n".join([f"**{heading.replace('Args', 'Arguments')}**:", "", *items])


def _to_markdown(text: str) -> str:
    """Convert roles and double backquotes to code in Markdown, and escape what would be HTML."""
    text = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", text).replace("``", "`")
    code_and_prose = text.split("`")  # prose has the even places
    code_and_prose[::2] = [prose.replace("<", "\\<") for prose in code_and_prose[::2]]
    return "`".join(code_and_prose)
