"""Inputs that a machine makes up: a result, or a line that says what is wrong; never a stack trace.

TRUST_EXAMPLES in the environment is how many of each kind; by default 20, the same every time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_posenc import registry, specs
from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.errors import CONTROL, UserError
from fairseq_posenc.tasks.glue.definitions import TASKS
from fairseq_posenc.tokens import gpt2
from fairseq_posenc.tokens.squad_file import read_odds, read_predictions, read_squad
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.experiments.variants import parse_variants
from fairseq_posenc.workbench.finetuning.glue.report import read_result
from fairseq_posenc.workbench.finetuning.glue.runs import (
    CONFIGS,
    RESULT,
    GlueRun,
    compose_task_config,
    read_run,
)
from fairseq_posenc.workbench.finetuning.squad.score import evaluate, unanswered
from fairseq_posenc.workbench.results import record
from fairseq_posenc.workbench.running import logs

sys.path.insert(0, str(Path(__file__).parents[2] / "preprocess"))
from binarize import command, formats, options
from glue_tasks.rows import read_examples

EXAMPLES = os.environ.get("TRUST_EXAMPLES")
made_up = settings(
    max_examples=int(EXAMPLES or 20),
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
LONGEST = 12  # positions of the stacks
NUMBERS = ["0", "-1", "1", "3", "8", "1e308", "nan", "inf", "-inf", "10" * 20, "0.5", "1e-300"]


@contextlib.contextmanager
def result_or_line() -> Iterator[None]:
    """Let a user's mistake pass, if it is told in a line that can be read."""
    told = "something"
    try:
        yield
    except UserError as error:
        told = str(error)
    assert told
    assert "\n" not in told
    assert len(told) < 21_000


# ------------------------------------------------------------------------------ specs and options

words = st.sampled_from([*registry.names(), "reset", "causal", "+", "(", ")", ",", "=", " ", "x"])
texts = st.one_of(st.text(max_size=80), st.lists(words, max_size=12).map("".join))


@st.composite
def written_specs(draw: Any) -> str:
    """Return a spec that can be read, or nearly: encodings with options of any value."""
    parts = []
    for name in draw(st.lists(st.sampled_from(registry.names()), min_size=1, max_size=3)):
        names = st.sampled_from([*registry.options(name), "bass"])
        values = st.sampled_from([*NUMBERS, "true", "false", "half", "yarn:4", "ntk:1e308"])
        given = draw(st.dictionaries(names, values, max_size=2))
        told = ",".join(f"{key}={value}" for key, value in given.items())
        parts.append(f"{name}({told})" if given else name)
    return "+".join(parts)


@made_up
@given(st.one_of(texts, written_specs()))
def test_specs(text):
    with result_or_line():
        spec = specs.parse(text)
        assert specs.parse(str(spec)) == spec
    with result_or_line():
        parse_variants(text)


def stack(spec: str, causal: bool, heads: int, width: int) -> tuple[Any, Any] | None:
    """Return the positions of a stack and a layer, None if they are refused."""
    with result_or_line():
        positions = StackPositions(spec, width, heads, LONGEST, causal)
        return positions, SelfAttention(positions)
    return None


sizes = {
    "batch": st.integers(1, 3),
    "length": st.integers(1, LONGEST),
    "heads": st.sampled_from([1, 2, 4]),
    "width": st.sampled_from([8, 12, 16]),
    "causal": st.booleans(),
    "dtype": st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    "seed": st.integers(0, 99),
}


@made_up
@given(spec=st.one_of(written_specs(), st.sampled_from(registry.names())), **sizes)
def test_sizes_masks_and_types(spec, batch, length, heads, width, causal, dtype, seed):
    """Padding of any kind, whole rows of it as well: outputs and gradients are finite numbers."""
    built = stack(spec, causal, heads, width)
    if built is None:
        return
    torch.manual_seed(seed)
    positions, layer = (module.to(dtype) for module in built)
    x = torch.randn(batch, length, width, dtype=dtype, requires_grad=True)
    padding = torch.rand(batch, length) < 0.4
    if positions.has_window or positions.has_tables:  # refuses padding between tokens
        padding = padding.sort(dim=1, descending=seed % 2 == 0).values
    padding[0] = seed % 3 == 0  # or an empty sentence
    embedded, shared = positions(x, padding)
    out, _ = layer(embedded, shared)
    assert out.shape == x.shape
    assert out.dtype == dtype
    assert out.isfinite().all()
    out.float().square().sum().backward()
    assert x.grad.isfinite().all()


@made_up
@given(
    *[st.integers(-2, 40)] * 2,
    st.sampled_from([-1, 0, 1, 3, 7]),
    st.sampled_from(["m4m", "learned", "rope"]),
)
def test_sizes_that_cannot_be(width, heads, positions, spec):
    with result_or_line():
        StackPositions(spec, width, heads, positions)


# ----------------------------------------------------------------------------------------- texts

odd = st.sampled_from(
    [
        "",
        "\0",
        "\ufeff",
        "\u202eabc",
        "שלום עולם",
        "👩‍👩‍👧",
        "a" * 100_000,
        "\u2028",
        "\x1a",
        "e\u0301",
    ]
)
lines = st.lists(st.one_of(odd, st.text(max_size=40)), max_size=8)
files = st.one_of(
    st.binary(max_size=200),
    lines.map(lambda found: "\n".join(found).encode("utf-8", "surrogatepass")),
)


def written(content: bytes | str) -> Path:
    """Return a new file."""
    folder = Path(tempfile.mkdtemp(dir=FOLDER.name))
    path = folder / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


FOLDER = tempfile.TemporaryDirectory(prefix="fairseq-posenc-inputs-")


@made_up
@given(files)
def test_texts(content):
    path = written(content)
    call = ["--words", "--workers", "1", "--train", path, "--out", path.with_name("out")]
    with result_or_line():
        command.run(options.make_parser("").parse_args(list(map(str, call))), formats.plain)
        assert (path.with_name("out") / "train.bin").exists()


cells = st.sampled_from(["0", "1", "x", "", "a\tb", '"', "\0", "é", "-1", "5.000", "nan"])
rows = st.lists(st.lists(cells, max_size=6).map("\t".join), max_size=6).map("\n".join)


@made_up
@given(st.one_of(files, rows), st.sampled_from(list(TASKS)), st.sampled_from(["train", "test"]))
def test_files_of_glue(content, task, split):
    with result_or_line():
        found = read_examples(written(content), TASKS[task], split)
        assert len({len(column) for column in found.sentences}) == 1


# ------------------------------------------------------------------------------------------ JSON

names = ["data", "paragraphs", "qas", "id", "context", "question", "answers", "text", "version"]
keys = st.sampled_from([*names, "answer_start", "kind", "figures", "a"])
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.just("\ud800")
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=5)),
    max_leaves=20,
)


@st.composite
def squads(draw: Any) -> Any:
    """Return a file of SQuAD in which anything may stand in place of something."""

    def perhaps(value: Any) -> Any:
        return draw(values) if draw(st.integers(0, 15)) == 0 else value

    answer = perhaps({"text": perhaps("b"), "answer_start": perhaps(2)})
    qa = {"id": perhaps("1"), "question": perhaps("?"), "answers": perhaps([answer])}
    paragraph = perhaps({"context": perhaps("a b c"), "qas": perhaps([perhaps(qa)])})
    return perhaps({"version": perhaps("1.1"), "data": perhaps([{"paragraphs": [paragraph]}])})


@made_up
@given(st.one_of(squads(), values), st.one_of(st.just({"1": "b"}), values))
def test_files_of_squad(content, predictions):
    path = written(json.dumps(content))
    answers = written(json.dumps(predictions))
    with result_or_line():
        read_odds(answers)
    with result_or_line():
        squad = read_squad(path)
        found = read_predictions(answers)
        if squad.answered and not unanswered(squad, found):
            evaluate(squad, found)


@made_up
@given(st.one_of(values.map(json.dumps), st.text(max_size=80), files))
def test_records_and_logs(content):
    path = written(content)
    with contextlib.suppress(record.RecordError):
        record.read(path)
    with result_or_line():
        logs.read_curve_file(path)


@made_up
@given(st.one_of(values, st.just("[" * 9999)), st.text(max_size=30))
def test_files_of_gpt2(encoder, merges):
    paths = (
        written(encoder if encoder == "[" * 9999 else json.dumps(encoder)),
        written(merges.encode("utf-8", "replace")),
    )
    with result_or_line():
        gpt2._load(*paths)


RUN = GlueRun("m4m", "RTE", 1e-5, 1, "accuracy", 9, "data", "model.pt", 0, {})
run_files = st.one_of(
    values, st.dictionaries(st.sampled_from(GlueRun._fields), values), st.just(RUN._asdict())
)


@made_up
@given(
    run_files,
    st.booleans(),
    values,
    st.one_of(values, st.dictionaries(st.just("metrics"), values)),
)
def test_what_glue_goes_on_from(run, whole, nested, result):
    folder = RUN.folder(written("").parent)
    folder.mkdir(parents=True)
    (folder / "request.json").write_text(json.dumps(run if whole else nested))
    (folder / RESULT).write_text(json.dumps(result))
    with result_or_line():
        assert read_run(folder)._fields == GlueRun._fields
    with result_or_line():
        assert read_result(RUN, folder.parents[1])["metrics"]


# ----------------------------------------------------------------------------------------- names

names_of_files = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20
).filter(lambda name: name.strip(".") and len(name.encode()) < 200)
names_of_all = st.one_of(
    names_of_files,
    st.sampled_from(["$\\nope$", "$x", "a|b", "`", "\x1b[31m", "a\nb", "<b>", "=", ","]),
)
LOG = "\n".join(
    f'2026 | INFO | {kind} | {{"{prefix}loss": "{9 - n}", "{prefix}num_updates": "{n}"}}'
    for n in range(1, 4)
    for kind, prefix in (("train_inner", ""), ("valid", "valid_"))
)


def one_text_of_lines(text: str) -> None:
    """Check that names put no control character into a text."""
    assert not CONTROL.search(text.replace("\n", ""))


@settings(made_up, max_examples=max(5, made_up.max_examples // 4))  # each draws two pictures
@given(names_of_all, names_of_files, st.text(max_size=9).filter(lambda text: "\0" not in text))
def test_names_of_curves(name, file, title):
    folder = written("").parent
    (folder / file).write_text(LOG)
    words = [f"{name}={folder / file}", "--title", title, "--out", str(folder / "out")]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = main(["learning-curves", *words])
    assert status in (0, 2)
    if status == 0:
        one_text_of_lines((folder / "out" / "curves.md").read_text())
        assert (folder / "out" / "curves.png").exists()
        assert record.read(folder / "out" / "curves.json").rows


@made_up
@given(names_of_files, names_of_all, st.sampled_from(["compare", "glue-test", "bleu", "squad"]))
def test_names_in_a_report(file, name, kind):
    folder = written("").parent / file
    folder.mkdir()
    row = {"model": name, "task": "SST-2", "accuracy": 94.0, name: 1.0}
    made = record.Record(kind, {"scores": [row]}, {"name": name}, command=name)
    made.write(folder / "record.json")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        assert main(["report", str(folder.parent)]) in (0, 2)
    one_text_of_lines(said.getvalue())


logs_of_fairseq = st.one_of(
    st.dictionaries(st.sampled_from(["epoch", "loss", "num_updates", "wps"]), values).map(
        json.dumps
    ),
    st.text(max_size=40),
)


@made_up
@given(st.sampled_from([" | valid | ", " | train_inner | epoch 001:  1 / 2 "]), logs_of_fairseq)
def test_lines_of_logs(kind, text):
    logs.read_curve([f"2026 | INFO{kind}{text}"])


# -------------------------------------------------------------------------------------- settings

settings_of = [
    "optimization.lr",
    "optimization.max_epoch",
    "model.dropout",
    "common",
    "a.b",
    "task",
]
settings_to = ["[1e-5]", "x", "", "[", "{", "null", "${a}", "???", "-1", "nan", "0", "[[]]", "é\0"]
changes = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(settings_of), st.sampled_from(settings_to)).map("=".join),
        st.text(max_size=12),
    ),
    max_size=3,
)


@settings(made_up, max_examples=max(3, made_up.max_examples // 10))  # each takes a second
@given(changes, st.sampled_from(["m4m", "decbert"]), st.integers(0, 9999))
def test_settings_of_a_configuration(overrides, protocol, examples):
    with result_or_line():
        compose_task_config(CONFIGS / f"{protocol}_rte.yaml", examples, overrides)
