"""``make docs``: writes the generated parts of the documentation, or finds outdated ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from docs.generate import encodings, families, papers, reference
from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole

ROOT = Path(__file__).parents[2]


def format_files(root: Path) -> dict[Path, str]:
    """Format all generated texts, by file.

    Raises:
        UserError: a page lacks the marker lines of a generated part.
    """
    docs = root / "docs"
    return {
        **encodings.format_files(docs / "encodings"),
        docs / "hf.md": families.format_page(docs / "hf.md"),
        docs / "papers.md": papers.format_page(),
        **reference.format_files(docs / "reference"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write all files, or with ``--check`` compare them; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of docs/")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    args = parser.parse_args(argv)
    try:
        for path, text in format_files(args.root).items():
            if not args.check:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, text)
            elif not path.exists() or path.read_text(encoding="utf-8") != text:
                raise UserError(f"{path} is out of date: run make docs")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
