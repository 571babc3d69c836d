"""Bundles definitions of the package into one source file that does not import the package.

Exports with code contain such a file. It has the wanted definitions (functions, classes and
assignments at the top level of a module), all definitions that these use, with the comments above
them, and imports of other packages. A name changes only if two modules define it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

PACKAGE = __name__.partition(".")[0]
_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# A reference in a docstring, such as :class:`~fairseq_posenc.positions.Span`; its last name stays.
_REFERENCE = re.compile(rf"~?\b{PACKAGE}\.[\w.]*\b(\w+)")
_RULE = f"# {'-' * 96}"  # a line of the comment that begins the definitions of a module


class Symbol(NamedTuple):
    """A name in a module; the name "" is the module itself."""

    module: str
    name: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether the module belongs to the package."""
        return self.module.partition(".")[0] == PACKAGE


class Use(NamedTuple):
    """A use of a symbol in a definition."""

    symbol: Symbol
    written: str  # the name by which it is used, perhaps that of an `import ... as ...`
    node: ast.Name | ast.Attribute  # is replaced as a whole if the name changes


class Module:
    """A parsed module of the package, which is not imported.

    It understands the Python of the bundled modules: imports, functions, classes and assignments at
    the top level. Imports inside functions and other blocks, and names in quoted annotations, are
    not followed; the tests run what is bundled.
    """

    def __init__(self, name: str) -> None:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")
        tree = ast.parse(text)
        self.name = name
        self.lines = text.splitlines()
        title = (ast.get_docstring(tree) or "").partition("\n")[0]
        self.title = _REFERENCE.sub(r"\1", title)
        self.definitions: dict[str, ast.stmt] = {}
        self._imported: dict[str, Symbol] = {}
        self._uses: dict[str, list[Use]] = {}  # of the definitions that were asked for
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.definitions[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                names = map(_stored, ast.walk(node))
                self.definitions |= {name: node for name in names if name}
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self._imported[alias.asname or alias.name] = Symbol(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self._imported[alias.asname or alias.name] = Symbol(node.module, alias.name)

    def find(self, name: str) -> Symbol | None:
        """Find the symbol of a name at the top level of the module; None for a built-in name."""
        if name in self.definitions:
            return Symbol(self.name, name)
        imported = self._imported.get(name)
        if imported is None or not imported.is_ours or not imported.name:
            return imported
        # `from package import module`
        if find_spec(imported.module).submodule_search_locations:  # type: ignore[union-attr]
            inner = f"{imported.module}.{imported.name}"
            if find_spec(inner):
                return Symbol(inner)
        # Where the name is defined; the module may import it, too.
        return load_module(imported.module).find(imported.name)

    def list_uses(self, name: str) -> list[Use]:
        """List the uses of symbols in the definition of a name."""
        if name not in self._uses:
            self._uses[name] = list(self._find_uses(self.definitions[name], frozenset()))
        return self._uses[name]

    def _find_uses(self, node: ast.AST, local: frozenset[str]) -> Iterator[Use]:
        """Yield the uses of symbols below a node; ``local`` are names bound inside functions."""
        if isinstance(node, _SCOPES):
            local |= _list_bound(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = None if node.value.id in local else self.find(node.value.id)
            if owner is not None and owner.is_ours and not owner.name:
                symbol = load_module(owner.module).find(node.attr)
                assert symbol is not None
                yield Use(symbol, node.attr, node)  # `module.name` becomes `name`
                return
        if isinstance(node, ast.Name) and node.id not in local:
            symbol = self.find(node.id)
            if symbol is not None:
                yield Use(symbol, node.id, node)
        for child in ast.iter_child_nodes(node):
            yield from self._find_uses(child, local)

    def format_definitions(self, names: Iterable[str], renamed: dict[Symbol, str]) -> list[str]:
        """Format definitions in their order; successive assignments become one text."""
        # By line, as an assignment to several names is a single definition.
        by_line = {self.definitions[name].lineno: name for name in names}
        ordered = [by_line[line] for line in sorted(by_line)]
        texts = []
        for is_block, group in groupby(ordered, self._is_block):
            definitions = [self._format_definition(name, renamed) for name in group]
            texts += definitions if is_block else ["\n".join(definitions)]
        return texts

    def _is_block(self, name: str) -> bool:
        """Whether the definition of a name is a function or a class."""
        return isinstance(self.definitions[name], (ast.FunctionDef, ast.ClassDef))

    def _format_definition(self, name: str, renamed: dict[Symbol, str]) -> str:
        """Format a definition and the comments above it, with new names for some symbols."""
        node = self.definitions[name]
        lines = list(self.lines)
        uses = [use for use in self.list_uses(name) if use.symbol.is_ours]
        # From last to first, so that a replacement does not move the columns of the next.
        uses.sort(key=lambda use: (use.node.lineno, use.node.col_offset), reverse=True)
        for use in uses:
            line = lines[use.node.lineno - 1].encode()  # columns count bytes
            new = renamed.get(use.symbol, use.symbol.name).encode()
            changed = line[: use.node.col_offset] + new + line[use.node.end_col_offset :]
            lines[use.node.lineno - 1] = changed.decode()
        new_name = renamed.get(Symbol(self.name, name), name)
        if self._is_block(name):
            heading = rf"(def|class) {name}\b"
            lines[node.lineno - 1] = re.sub(heading, rf"\1 {new_name}", lines[node.lineno - 1])
        first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
        while first > 1 and lines[first - 2].startswith("#"):
            first -= 1
        return _REFERENCE.sub(r"\1", "\n".join(lines[first - 1 : node.end_lineno]))


load_module = cache(Module)  # parses each module of the package once


def _stored(node: ast.AST) -> str:
    """Return the name that a node assigns; empty for any other node."""
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""


def _list_bound(scope: ast.AST) -> set[str]:
    """Collect the names that a function or comprehension binds, without those of inner ones."""
    bound: set[str] = set()
    to_visit = list(ast.iter_child_nodes(scope))
    while to_visit:
        node = to_visit.pop()
        if isinstance(node, ast.arg):
            bound.add(node.arg)
        if name := _stored(node):
            bound.add(name)
        if isinstance(node, ast.FunctionDef):
            bound.add(node.name)
        if not isinstance(node, _SCOPES):
            to_visit += ast.iter_child_nodes(node)
    return bound


def build_standalone(docstring: str, wanted: Iterable[Symbol]) -> str:
    """Build a module with a docstring from definitions, and all others that they use."""
    needed, imports = _collect_needed(list(wanted))
    counts = Counter([symbol.name for symbol in needed])
    renamed = {}  # definitions that share a name get that of their module before it
    for symbol in needed:
        if counts[symbol.name] > 1:
            module_name = symbol.module.rpartition(".")[2]
            renamed[symbol] = f"{module_name}_{symbol.name.lstrip('_')}"
    parts = ["\n".join([f'"""{docstring}"""\n', "from __future__ import annotations\n", *imports])]
    for module in _sort_modules(needed):
        parts.append(f"{_RULE}\n# {module.title}\n{_RULE}")
        in_module = [symbol.name for symbol in needed if symbol.module == module.name]
        parts += module.format_definitions(in_module, renamed)
    return "\n\n\n".join(parts) + "\n"


def _collect_needed(wanted: list[Symbol]) -> tuple[dict[Symbol, list[Symbol]], list[str]]:
    """Collect the needed definitions, with their uses of each other, and the lines of imports."""
    needed: dict[Symbol, list[Symbol]] = {}
    imported: dict[str, set[str]] = {}  # module of another package -> names
    to_visit = wanted[::-1]
    while to_visit:
        symbol = to_visit.pop()
        if symbol in needed:
            continue
        needed[symbol] = []
        for use in load_module(symbol.module).list_uses(symbol.name):
            module, name = use.symbol
            if use.symbol.is_ours:
                if use.symbol != symbol:
                    needed[symbol].append(use.symbol)
            elif use.written == (name or module):  # not renamed by `as`
                imported.setdefault(module, set()).add(name)
            else:
                imported.setdefault(module, set()).add(f"{name} as {use.written}")
        to_visit += needed[symbol][::-1]
    return needed, [_format_import(module, imported[module]) for module in sorted(imported)]


def _sort_modules(needed: dict[Symbol, list[Symbol]]) -> list[Module]:
    """Sort the modules of symbols so that each follows the modules that it uses."""
    used_modules: dict[str, list[str]] = {symbol.module: [] for symbol in needed}
    for symbol, used in needed.items():
        others = [other.module for other in used if other.module != symbol.module]
        used_modules[symbol.module] += others
    return [load_module(name) for name in TopologicalSorter(used_modules).static_order()]


def _format_import(module: str, names: set[str]) -> str:
    """Format the import of names from a module; the name "" is the module itself."""
    lines = [f"import {module}"] if "" in names else []
    if listed := ", ".join(sorted(names - {""})):
        line = f"from {module} import {listed}"
        lines.append(line if len(line) <= 100 else f"from {module} import (\n    {listed},\n)")
    return "\n".join(lines)
