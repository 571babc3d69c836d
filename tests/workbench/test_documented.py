"""The README and the pages: what they lead to is there, and their commands run, on small data."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import options
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from fairseq_posenc import api
from fairseq_posenc.api import PositionEncoding
from fairseq_posenc.encodings import base
from fairseq_posenc.workbench import cli
from tests.helpers import documented
from tests.helpers.commands import USER_DIR, new_directory, trained
from tests.helpers.documented import FENCED, FILES, LEFT_OUT, ROOT, commands, run, scripts
from tests.helpers.hf_models import save_tokenizer
from tests.helpers.products import some_of
from tests.workbench.finetuning import test_squad_commands as squad
from tests.workbench.translation import test_translation_commands as translation

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\]\([^)]*\))*\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """Return a page without its blocks of code and what is quoted as code."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "code", text)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=str)
def test_links_lead_somewhere(page):
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {target}"


def test_what_is_said_to_be_held_by_a_test_has_one():
    text = (DOCS / "elsewhere.md").read_text(encoding="utf-8")
    with_vectors = json.loads((DOCS / "vectors" / "vectors.json").read_text(encoding="utf-8"))
    for section in text.split("\n## ")[1:]:
        held = section.partition("Held by ")[2]
        linked = re.findall(r"\[([^\]]+)\]\(\.\./(tests/[^)]+)\)", held)
        assert linked, section
        for names, file in linked:
            source = (ROOT / file).read_text(encoding="utf-8")
            for name in re.findall(r"`(\w+)`", names):
                assert f"\ndef {name}(" in source, f"{file}: {name}"
        vectors = re.findall(r"`(\w+)`", held.partition("vectors ")[2])
        assert set(vectors) <= with_vectors.keys(), vectors


@pytest.mark.matrix
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("furo", "myst_parser", "sphinx"))),
    reason="left out: pip install 'fairseq-posenc[site]'",
)
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", str(DOCS)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "encodings" / "m4m.html").read_text(encoding="utf-8")
    assert "<msub>" in page
    reference = (tmp_path / "reference" / "library.html").read_text(encoding="utf-8")
    for name in api.__all__:
        assert f'id="{name.lower()}"' in reference, name
    for html in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', html.read_text()
        )
        assert not loaded, f"{html}: {loaded}"


# ----------------------------------------------------------------------------------- commands

# Pages whose commands are those of measurements.
RECORDS = {
    "benchmarks.md": "measures for minutes, into docs/results; test_benchmarks.py",
    "gpu.md": "as benchmarks.md",
    "reliability.md": "as benchmarks.md; make test-trust",
    "results/demo.md": "the record of a run; compare runs on other pages",
    "results/trained_models.md": "needs trained models, for hours; tests/hf, tests/benchmarks",
    "results/transformers.md": "tries all cells, for minutes; tests/hf/test_cells.py",
}


def masked() -> Path:
    return trained("masked_lm").save_dir / "checkpoint_last.pt"


def unanswered() -> Path:
    """Return a folder as predictions for SQuAD 2.0 leave it: no answer to any question."""
    folder = new_directory()
    articles = json.loads(squad.files().raw.read_text())["data"]
    ids = [qa["id"] for each in articles for text in each["paragraphs"] for qa in text["qas"]]
    (folder / "answers.json").write_text(json.dumps(dict.fromkeys(ids, "")))
    (folder / "null_odds.json").write_text(json.dumps(dict.fromkeys(ids, 0.0)))
    return folder


def array_of_rope() -> Path:
    path = new_directory() / "mine.npz"
    name = "rope/scores"
    arrays: dict[str, Any] = {name: load_file(DOCS / "vectors" / "vectors.safetensors")[name]}
    np.savez(path, **arrays)
    return path


# Pages whose commands are read, and run only where products are whole: other tests, or the README,
# run the same ones with other options.
READ = {
    "compare.md": "tests/workbench/experiments",
    "exchange.md": "tests/workbench/convert",
    "finetune.md": "tests/workbench/finetuning",
    "layers.md": "README.md",
    "plots.md": "tests/workbench/plots",
    "preprocessing.md": "tests/preprocess",
    "start.md": "README.md",
    "training.md": "tests/test_user_dir.py",
}
# What a page means by a name that others use for something else.
OWN = {
    "exchange.md": {
        "longer": FILES["my-model"],
    },
    "plots.md": {"checkpoint_best.pt": translation.checkpoint},
    "training.md": {"first/data/binary": FILES["data-bin/wiki"]},
    "compare.md": {name: FILES["rope.log"] for name in ("bert.log", "diff.log")}
    | {f"checkpoints/{name}/train.log": FILES["rope.log"] for name in ("bert", "diff")},
    "finetune.md": {"runs/squad20/dev": unanswered},
    "vectors/README.md": {"mine.npz": array_of_rope},
    "commands.md": {
        name: lambda: trained("masked_lm").save_dir
        for name in (
            *("checkpoints/b_small", "results", "lm-length", "curves"),
            *("runs/m4m", "runs/m4m-54gb"),
        )
    }
    | {"demo/compare.json": lambda: DOCS / "results" / "stages.json"},
}
WITH_COMMANDS = [
    path for path in [ROOT / "README.md", *PAGES] if scripts(path) and path != DOCS / "index.md"
]


def name_of(path: Path) -> str:
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


PYTHON = [path for path in [ROOT / "README.md", *PAGES] if documented.python_of(path)]
PYTHON.remove(DOCS / "adding.md")  # its example registers an encoding; another test runs it
RUN = [path for path in WITH_COMMANDS if name_of(path) not in {*RECORDS, *READ}]


def test_blocks_are_commands_or_say_what_they_are():
    for path in WITH_COMMANDS:
        for script in scripts(path):
            first = commands(script)[0]
            assert re.match(documented.PROGRAMS, first), f"{path}: {first}"


def test_what_is_left_out_is_there():
    found = [
        line for path in WITH_COMMANDS for script in scripts(path) for line in commands(script)
    ]
    for start in LEFT_OUT:
        assert any(line.startswith(start) for line in found), start
    assert all((DOCS / name).exists() for name in [*RECORDS, *OWN])


@pytest.mark.slow
@pytest.mark.parametrize("page", some_of(RUN, [*RUN, *map(DOCS.joinpath, READ)]), ids=name_of)
def test_commands_of_a_page_run_one_after_the_other(page):
    folder, files = new_directory(), {**FILES, **OWN.get(name_of(page), {})}
    for script in scripts(page):
        run(script, folder, files)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", some_of([x for x in PYTHON if name_of(x) != "exchange.md"], PYTHON), ids=name_of
)
def test_python_of_a_page_runs(page, monkeypatch):
    folder, names = new_directory(), {"__name__": "page"}
    (folder / "checkpoint_best.pt").symlink_to(masked())
    (folder / "my-model").symlink_to(FILES["my-model"]())
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=30, rope_theta=100000.0)
    smollm2 = folder / "HuggingFaceTB/SmolLM2-135M-Instruct"
    LlamaForCausalLM(config).save_pretrained(smollm2)
    save_tokenizer(smollm2, ["tell", "me", "a", "story", "of", "two", "hosts"])
    monkeypatch.chdir(folder)
    for code in documented.python_of(page):
        exec(compile(code, page.name, "exec"), names)


def test_the_encoding_that_is_added_as_an_example_is_its_formula(monkeypatch):
    monkeypatch.setitem(base.ENCODINGS, "root", base.Encoding)  # taken out again in the end
    del base.ENCODINGS["root"]
    code, _ = documented.python_of(DOCS / "adding.md")
    exec(compile(code, "root.py", "exec"), {"__name__": "root"})
    encoding = PositionEncoding("root", embed_dim=16, num_heads=2)
    query, key = torch.randn(2, 1, 2, 5, 8)
    (rate,) = encoding.parameters()
    for i in range(5):
        for j in range(5):
            expected = query[0, :, i].mul(key[0, :, j]).sum(1) / 8**0.5 - rate * abs(j - i) ** 0.5
            torch.testing.assert_close(encoding.scores(query, key)[0, :, i, j], expected)
    assert rate.numel() == 2  # one for each head


RECORDED = sorted((DOCS / "results").glob("*.md"))


@pytest.mark.parametrize("page", [*RECORDED, *map(DOCS.joinpath, READ)], ids=name_of)
def test_commands_can_be_given(page, monkeypatch):
    """Those of records took hours; here their options are read, and no more."""
    monkeypatch.setattr(cli.Command, "run", lambda command, args: 0)
    blocks = scripts(page) if page not in RECORDED else [page.read_text(encoding="utf-8")]
    for line in (line for block in blocks for line in commands(re.sub(r"(?m)^ +", "", block))):
        # What stands for a variable, and the end of a command.
        line = re.sub(r"\$\(fairseq-posenc user-dir\)|\bfairseq_posenc\b", str(USER_DIR), line)
        line = line.replace("$2", "roberta_rope")
        line = re.sub(r"\$[a-z]\w*", "rope", line)
        line = re.sub(r" > .*|;.*| \.\.\.", "", line)
        if line.startswith("fairseq-posenc "):
            assert cli.main(shlex.split(line, comments=True)[1:]) == 0, line
        elif line.startswith("fairseq-train ") and not documented.why_left_out(line):
            words = shlex.split(line, comments=True)[1:]
            options.parse_args_and_arch(options.get_training_parser(), words)
