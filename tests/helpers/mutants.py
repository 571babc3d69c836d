"""Makes small mistakes in the code, one at a time, and lists those that no test notices.

    python -m tests.helpers.mutants --code fairseq_posenc/encodings --tests tests/test_state.py

A mutant is a copy of this tree in which one operator, comparison, constant or default is another,
or one statement is left out, in a function. ``--seed`` draws the mutants, and the order in which
each meets the tests, up to ``--seconds`` of the processor's time. WHOLE_PRODUCTS=1 shows what
choosing from products costs (``tests/helpers/products.py``).
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "demo", "build", "dist", "site")
# Imported once, for all mutants; nothing of this project is among them.
IMPORTED = ("torch", "torch.export", "fairseq.options", "transformers", "pytest", "sacrebleu")
OTHER: dict[Any, Any] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.Pow: ast.Mult, ast.MatMult: ast.Add},
    **{ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt},
    **{ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}


class Mutant(NamedTuple):
    path: Path  # below the tree
    node: Any  # of its syntax tree
    new: str  # text in place of the node's

    def __str__(self) -> str:
        old = " ".join(ast.unparse(self.node).split())
        return f"{self.path}:{self.node.lineno}: {old[:90]}  ->  {self.new[:90]}"

    def apply(self, tree: Path) -> None:
        """Write the changed file into a tree."""
        lines = (ROOT / self.path).read_bytes().splitlines(keepends=True)
        first, last = self.node.lineno - 1, self.node.end_lineno - 1
        before = lines[first][: self.node.col_offset]
        after = lines[last][self.node.end_col_offset :]
        lines[first : last + 1] = [before + self.new.encode() + after]
        (tree / self.path).write_bytes(b"".join(lines))


def _can_be_left_out(node: ast.AST) -> bool:
    """Return whether a function without a statement still has all its names."""
    if isinstance(node, ast.Assign):
        names = [{x.id for x in ast.walk(n) if isinstance(x, ast.Name)} for n in node.targets]
        used = {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)}
        return not isinstance(node.targets[0], (ast.Name, ast.Tuple)) or set.union(*names) <= used
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return (is_call and "super()" not in ast.unparse(node)) or isinstance(
        node, (ast.AugAssign, ast.Raise)
    )


def _change(node: ast.AST) -> str | None:
    """Return the text of a node with another meaning; None if there is none for it."""
    new: Any = copy.deepcopy(node)
    if isinstance(new, (ast.BinOp, ast.BoolOp)) and type(new.op) in OTHER:
        new.op = OTHER[type(new.op)]()
    elif isinstance(new, ast.Compare) and len(new.ops) == 1 and type(new.ops[0]) in OTHER:
        new.ops = [OTHER[type(new.ops[0])]()]
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, (ast.Not, ast.USub)):
        new = new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        new.value = not new.value
    elif isinstance(new, ast.Constant) and isinstance(new.value, (int, float)):
        new.value += 1
    elif _can_be_left_out(new):
        return "pass"
    else:
        return None
    return ast.unparse(new) if isinstance(new, ast.Constant) else f"({ast.unparse(new)})"


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a syntax tree, but for annotations, which have no effect, and parts of texts."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns") and not isinstance(node, ast.JoinedStr):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def list_mutants(path: Path) -> list[Mutant]:
    """List all mutants of the functions of a file, which is given below the tree."""
    found: dict[int, ast.AST] = {}  # by identity: functions may stand in others
    for function in ast.walk(ast.parse((ROOT / path).read_bytes())):
        if isinstance(function, ast.FunctionDef):
            defaults = [*function.args.defaults, *filter(None, function.args.kw_defaults)]
            for part in [*defaults, *function.body]:
                found.update((id(node), node) for node in _nodes(part))
    changes = ((node, _change(node)) for node in found.values())
    return [Mutant(path, node, new) for node, new in changes if new]


def draw_mutants(files: list[Path], count: int, seed: int) -> list[Mutant]:
    """Draw mutants of files, each kind of node and each file as likely as another."""
    draw = random.Random(seed)
    chosen: list[Mutant] = []
    groups: dict[tuple[Path, str], list[Mutant]] = defaultdict(list)
    for path in files:
        for mutant in list_mutants(path):
            groups[path, type(mutant.node).__name__].append(mutant)
    while len(chosen) < count and groups:
        key = draw.choice(sorted(groups))
        chosen.append(groups[key].pop(draw.randrange(len(groups[key]))))
        if not groups[key]:
            del groups[key]
    return chosen


class Shuffle:
    """Puts tests into an order that a seed draws, so that the first ones are some of each kind."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put them into their order."""
        random.Random(self.seed).shuffle(items)


def run_tests(tree: Path, words: list[str], plugin: Shuffle, limit: int) -> int:
    """Run tests in a child process for ``limit`` s; return pytest's code, or -signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    signal.alarm(10 * limit)  # for a mutant that waits
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    printed = os.open(tree.with_name("printed"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.dont_write_bytecode = True
    alone = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout=60"]
    status = pytest.main([*alone, *words], [plugin])
    with suppress(Exception):
        importlib.import_module("tests.helpers.programs")._server.cache_clear()
    os._exit(int(status))


def main() -> None:
    """Run as the module's description says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", nargs="+", required=True, help="files and folders to change")
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest is given")
    parser.add_argument("--only", default="", help="which of the tests, as pytest's -m")
    parser.add_argument("--count", type=int, default=30, help="how many mutants; default: 30")
    parser.add_argument("--seed", type=int, default=0, help="which ones; default: 0")
    parser.add_argument("--seconds", type=int, default=60, help="of tests for each; default: 60")
    args = parser.parse_args()
    for module in IMPORTED:
        importlib.import_module(module)
    code = [Path(name) for name in args.code]
    files = [f for path in code for f in ([path] if path.suffix else sorted(path.rglob("*.py")))]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="fairseq-posenc-mutants-") as folder:
        tree = Path(folder).resolve() / "tree"
        printed = tree.with_name("printed")
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT, symlinks=True)
        words, order = [*args.tests, "-m", args.only], Shuffle(args.seed)
        if run_tests(tree, words, order, args.seconds) > 0:
            sys.exit(f"without a mistake, too, they fail:\n{printed.read_text(errors='replace')}")
        mutants = draw_mutants(files, args.count, args.seed)
        for count, mutant in enumerate(mutants, 1):
            mutant.apply(tree)
            status = run_tests(tree, words, order, args.seconds)
            missed += status <= 0
            verdict = "caught" if status > 0 else "MISSED" if status == 0 else "missed so far"
            print(f"{count}/{len(mutants)} {verdict}: {mutant}", flush=True)
            shutil.copy2(ROOT / mutant.path, tree / mutant.path)
    print(f"{len(mutants) - missed} of {len(mutants)} mutants are caught")


if __name__ == "__main__":
    main()
