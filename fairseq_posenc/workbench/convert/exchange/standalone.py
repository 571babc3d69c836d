"""Writes modules of the package, and what they need of it, as one file that needs none of it.

A definition is taken over as its text stands, with the comments above it, if something that is
taken over names it. Only names that two modules use for different things are changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fairseq_posenc.workbench.convert.exchange.source import Module, Symbol, Use, module

_RULE = f"# {'-' * 96}"


def standalone(title: str, wanted: Iterable[Symbol]) -> str:
    """Return a module with some definitions, and what they need of the package.

    Args:
        title: its docstring.
        wanted: the definitions.
    """
    taken, imports = _needed(list(wanted))
    counts = Counter([symbol.name for symbol in taken])
    names = {each: _distinct(each) for each in taken if counts[each.name] > 1}
    parts = ["\n".join([f'"""{title}"""\n', "from __future__ import annotations\n", *imports])]
    for source in _modules_in_order(taken):
        parts.append(f"{_RULE}\n# {source.title}\n{_RULE}")
        parts += source.texts([each.name for each in taken if each.module == source.name], names)
    return "\n\n\n".join(parts) + "\n"


def _needed(first: list[Symbol]) -> tuple[dict[Symbol, list[Symbol]], list[str]]:
    """Return all definitions that are needed, with what each names, and imports from elsewhere."""
    taken: dict[Symbol, list[Symbol]] = {}
    outside: dict[str, set[str]] = {}
    left = first[::-1]
    while left:
        symbol = left.pop()
        if symbol in taken:
            continue
        uses = module(symbol.module).uses(symbol.name)
        taken[symbol] = [use.symbol for use in uses if use.symbol.is_ours and use.symbol != symbol]
        for use in uses:
            if not use.symbol.is_ours:
                outside.setdefault(use.symbol.module, set()).add(_alias(use))
        left += taken[symbol][::-1]
    return taken, [_import(source, outside[source]) for source in sorted(outside)]


def _modules_in_order(taken: dict[Symbol, list[Symbol]]) -> list[Module]:
    """Return the modules of symbols, each after those that it needs."""
    needs: dict[str, list[str]] = {symbol.module: [] for symbol in taken}
    for symbol, named in taken.items():
        needs[symbol.module] += [each.module for each in named]
    order: dict[str, None] = {}

    def add(name: str, above: tuple[str, ...] = ()) -> None:
        for each in dict.fromkeys(needs[name]):
            if each not in (name, *above):
                add(each, (*above, name))
        order[name] = None

    for name in needs:
        add(name)
    return [module(name) for name in order]


def _alias(use: Use) -> str:
    """Return what is imported for a use from its module; "" is the module itself."""
    name = use.symbol.name
    return name if use.written == (name or use.symbol.module) else f"{name} as {use.written}"


def _import(source: str, names: set[str]) -> str:
    lines = [f"import {source}"] if "" in names else []
    if listed := ", ".join(sorted(names - {""})):
        line = f"from {source} import {listed}"
        lines.append(line if len(line) <= 100 else f"from {source} import (\n    {listed},\n)")
    return "\n".join(lines)


def _distinct(symbol: Symbol) -> str:
    """Return a name that tells a definition from another one of that name."""
    return f"{symbol.module.rpartition('.')[2]}_{symbol.name.lstrip('_')}"
