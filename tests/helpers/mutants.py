"""Makes small mistakes in the code, one at a time, and lists those that no test notices.

    python -m tests.helpers.mutants --code fairseq_posenc/encodings --tests tests/test_state.py

A mutant is a copy of this tree in which one operator, comparison or constant is another, or one
statement is left out, in the body of a function. Which mutants are made is drawn by ``--seed``.
Those that survive the tests meet them again with the whole of their products
(``tests/helpers/products.py``), so the last lines say what choosing from these costs.
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
DROPPED = (ast.Assign, ast.AugAssign, ast.Raise)


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


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


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
    elif isinstance(new, DROPPED) or _is_call(new):
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
    syntax = ast.parse((ROOT / path).read_bytes())
    bodies = (each.body for each in ast.walk(syntax) if isinstance(each, ast.FunctionDef))
    nodes = {id(node): node for body in bodies for each in body for node in _nodes(each)}
    changes = ((node, _change(node)) for node in nodes.values())
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


def run_tests(tree: Path, tests: list[str], whole: bool, limit: int) -> int:
    """Run tests of a tree in a child process.

    Args:
        tree: A copy of this one.
        tests: What pytest is given.
        whole: Whether the products of the tests are whole.
        limit: Seconds of processor time after which the child is ended.

    Returns:
        The exit code of pytest; a negative number if a signal ended it.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    printed = os.open(tree.with_name("printed"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["WHOLE_PRODUCTS"] = str(int(whole))
    sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    import pytest

    code = pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout=0", *tests])
    with suppress(Exception):
        importlib.import_module("tests.helpers.programs")._server.cache_clear()
    os._exit(int(code))


def main() -> None:
    """Run as the module's description says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", nargs="+", required=True, help="files and folders to change")
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest is given")
    parser.add_argument("--only", default="", help="which of the tests, as pytest's -k")
    parser.add_argument("--count", type=int, default=30, help="how many mutants; default: 30")
    parser.add_argument("--seed", type=int, default=0, help="which ones; default: 0")
    parser.add_argument("--limit", type=int, default=600, help="seconds of each; default: 600")
    args = parser.parse_args()
    for module in IMPORTED:
        importlib.import_module(module)
    given = [Path(each) for each in args.code]
    tests = [*args.tests, "-k", args.only] if args.only else args.tests
    files = [f for each in given for f in ([each] if each.suffix else sorted(each.rglob("*.py")))]
    with tempfile.TemporaryDirectory(prefix="fairseq-posenc-mutants-") as folder:
        tree = Path(folder).resolve() / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT, symlinks=True)
        if code := run_tests(tree, tests, False, args.limit):
            printed = tree.with_name("printed").read_text(errors="replace")
            sys.exit(f"{printed[-3000:]}\nthe tests fail without a mutant: exit code {code}")
        missed, lost = [], []
        mutants = draw_mutants(files, args.count, args.seed)
        for count, mutant in enumerate(mutants, 1):
            mutant.apply(tree)
            caught = run_tests(tree, tests, False, args.limit)
            found = caught or run_tests(tree, tests, True, args.limit)
            said = (
                "caught" if caught else "caught by the whole products alone" if found else "MISSED"
            )
            lost += [mutant] if found and not caught else []
            missed += [] if found else [mutant]
            print(f"{count}/{len(mutants)} {said}: {mutant}", flush=True)
            shutil.copyfile(ROOT / mutant.path, tree / mutant.path)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{len(mutants)} mutants in {spent.ru_utime + spent.ru_stime:.0f} s of processor time")
    print(f"caught by the tests as they are: {len(mutants) - len(missed) - len(lost)}")
    print(f"caught by the whole products: {len(mutants) - len(missed)}")


if __name__ == "__main__":
    main()
