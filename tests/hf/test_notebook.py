"""The notebook on models of transformers runs and prints what it shows."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import matplotlib

NOTEBOOK = Path(__file__).parents[2] / "docs/hf.ipynb"


def test_the_notebook_prints_what_it_shows():
    """With fewer updates and scores, so that perplexities are other numbers."""
    matplotlib.use("agg")
    names: dict = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            shown = [line for output in cell["outputs"] for line in output.get("text", ())]
            source = "".join(cell["source"]).replace("updates=200", "updates=20")
            source = source.replace("40_000", "4_000")  # bytes to score
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(source, NOTEBOOK.name, "exec"), names)
            texts = (re.sub(r" *\d+\.\d\d", " X", x) for x in (printed.getvalue(), "".join(shown)))
            assert len(set(texts)) == 1, printed.getvalue()
    names["plt"].close("all")
    short, *_ = names["curves"]["own"]
    assert short < 40  # of 256 bytes
