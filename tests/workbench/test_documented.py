"""Pages and helps: links lead somewhere, commands can be given, those of five pages run.

A page that names an option, a file or a function that is no longer there is found nowhere else.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from fairseq import options

from fairseq_posenc import api
from fairseq_posenc.api import PositionEncoding
from fairseq_posenc.encodings import base
from fairseq_posenc.workbench import cli
from fairseq_posenc.workbench.examples import EXAMPLES
from fairseq_posenc.workbench.finetuning.squad.command import ACTIONS
from tests.helpers import shrink_command
from tests.helpers.commands import USER_DIR, new_directory, script, sentences, trained
from tests.helpers.documented import FENCED, ROOT, own_encodings, python_of, scripts
from tests.helpers.hf_models import MODELS, save_tokenizer
from tests.helpers.products import some_of
from tests.helpers.programs import BIN
from tests.workbench.experiments.test_corpus import small_text

README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ADDING = DOCS / "adding.md"
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\]\([^)]*\))*\]\(([^)\s]+)\)")
# How a command begins.
PROGRAMS = (
    r"(?:[A-Z_]+=\S+ )*"
    r"(?:fairseq-\S+|python|pip|make|train_scripts/\S+|sbatch|wget|tensorboard|\.|for)"
)


def name_of(path: Path) -> str:
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


def prose(path: Path) -> str:
    """Return a page without its blocks of code and what is quoted as code."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "code", text)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


def commands(text: str) -> list[str]:
    """Return the commands of a script, one after the other, without comments."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md", *PAGES], ids=str)
def test_links_lead_somewhere_and_blocks_begin_with_a_program_or_say_their_kind(page):
    for text in scripts(page):
        assert re.match(PROGRAMS, commands(text)[0])
    for target in LINK.findall(prose(page)):
        if not target.startswith(("http://", "https://")):
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
def test_the_site_is_built_without_a_warning(tmp_path):
    for package in ("furo", "myst_parser", "sphinx"):
        pytest.importorskip(package, reason="left out: pip install 'fairseq-posenc[site]'")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", DOCS, tmp_path]
    subprocess.run(command, check=True)
    assert "<msub>" in (tmp_path / "encodings" / "m4m.html").read_text(encoding="utf-8")
    reference = (tmp_path / "reference" / "library.html").read_text(encoding="utf-8")
    for name in api.__all__:
        assert f'id="{name.lower()}"' in reference, name
    loaded = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="https?:')
    assert not [html for html in tmp_path.rglob("*.html") if loaded.search(html.read_text())]


@cache
def llama() -> Path:
    """Return the folder of a small model, as SmolLM2 but for its sizes."""
    folder = new_directory() / "model"
    MODELS["llama"].build(num_hidden_layers=4, rope_theta=100000.0).save_pretrained(folder)
    save_tokenizer(folder, ["tell", "me", "a", "story", "of", "two", "hosts"])
    return folder


# What commands name, made for the first one that names it.
FILES: dict[str, Callable[[], Path]] = {
    **dict.fromkeys(("data-bin/docs", "data-bin/wiki"), sentences),
    **dict.fromkeys(("my.txt", "book.txt"), lambda: small_text(new_directory() / "book.txt")),
    "FOLDER": llama,
    "my_encodings": own_encodings,
}
# How commands begin that install, need a network, or are of the reader's shell.
LEFT_OUT = ("make", "pip ", ". .venv/bin/activate")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [README, ADDING, DOCS / "start.md", DOCS / "hf.md", DOCS / "layers.md"], ids=name_of
)
def test_commands_of_a_page_run_one_after_the_other(page, monkeypatch):
    monkeypatch.chdir(new_directory())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # Functions of bash that have a program do less of the same.
    less = f'"{BIN / "python"}" -IS "{shrink_command.__file__}"'
    names = ("fairseq-posenc", "fairseq-train")
    functions = "".join(f'{name}() {{ {less} "{script(name)}" "$@"; }}\n' for name in names)
    for text in scripts(page):
        given = "\n".join(x for x in commands(text) if not x.startswith(LEFT_OUT))
        for path, make in FILES.items():
            if path in given and not Path(path).exists():
                Path(path).parent.mkdir(exist_ok=True)
                Path(path).symlink_to(make())
        subprocess.run(["bash", "-ec", functions + given], input=b"", check=True)


# Texts with commands; the package with which those of adding.md train is not there.
COMMANDS = {name_of(page): page.read_text("utf-8") for page in [README, *PAGES] if page != ADDING}
COMMANDS |= {f"help of {name}": "\n".join(lines) for name, lines in EXAMPLES.items()}


@pytest.mark.parametrize("text", COMMANDS.values(), ids=COMMANDS)
def test_commands_can_be_given(text, monkeypatch):
    """Their options are read, and no more: the tests of each command run it."""
    monkeypatch.setattr(cli.Command, "run", lambda command, args: 0)
    for line in commands(re.sub(r"(?m)^ +", "", text)):
        # The value of a variable, and the end of a command.
        line = re.sub(r'"?\$\(fairseq-posenc user-dir\)"?|\bfairseq_posenc\b', str(USER_DIR), line)
        line = line.replace("$2", "roberta_rope").replace("KIND", "table")
        line = re.sub(r"\$[a-z]\w*", "rope", line)
        line = re.sub(r" > .*|;.*| \.\.\.", "", line)
        if line.startswith("fairseq-posenc ") and "--help" not in line:
            assert cli.main(shlex.split(line, comments=True)[1:]) == 0, line
        elif line.startswith("fairseq-train ") and "$(ls" not in line:
            words = shlex.split(line, comments=True)[1:]
            options.parse_args_and_arch(options.get_training_parser(), words)


@pytest.mark.parametrize("name", [*cli.COMMANDS, *(f"squad {action}" for action in ACTIONS)])
def test_the_help_ends_with_examples(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*name.split(), "--help"])
    assert ended.value.code == 0
    message = capsys.readouterr()
    assert message.out.endswith("\n  ".join(["\nexamples:", *EXAMPLES[name]]) + "\n")
    assert not message.err
    assert all(f"fairseq-posenc {name}" in line for line in EXAMPLES[name])


# The example of adding.md registers an encoding; another test runs it.
PYTHON = [path for path in [README, *PAGES] if python_of(path) and path != ADDING]
FAST = [page for page in PYTHON if name_of(page) != "exchange.md"]


@pytest.mark.slow
@pytest.mark.parametrize("page", some_of(FAST, PYTHON), ids=name_of)
def test_python_of_a_page_runs(page, monkeypatch):
    monkeypatch.chdir(new_directory())
    checkpoint = trained("masked_lm").save_dir / "checkpoint_last.pt"
    Path("checkpoint_best.pt").symlink_to(checkpoint)
    Path("HuggingFaceTB").mkdir()
    Path("HuggingFaceTB/SmolLM2-135M-Instruct").symlink_to(llama())
    if page.name == "exchange.md":
        words = ["--checkpoint", str(checkpoint), "--out", "my-model", "--tokens", "words"]
        assert cli.main(["export", *words]) == 0
    names = {"__name__": "page"}
    for code in python_of(page):
        exec(compile(code, page.name, "exec"), names)


def test_the_encoding_that_is_added_as_an_example_is_its_formula(monkeypatch):
    monkeypatch.setitem(base.ENCODINGS, "root", base.Encoding)  # taken out again in the end
    del base.ENCODINGS["root"]
    code, _ = python_of(DOCS / "adding.md")
    exec(compile(code, "root.py", "exec"), {"__name__": "root"})
    encoding = PositionEncoding("root", embed_dim=16, num_heads=2)
    query, key = torch.randn(2, 1, 2, 5, 8)
    (rate,) = encoding.parameters()
    distance = (torch.arange(5) - torch.arange(5)[:, None]).abs()
    expected = query @ key.mT / 8**0.5 - rate.view(2, 1, 1) * distance**0.5  # one for each head
    torch.testing.assert_close(encoding.scores(query, key), expected)
