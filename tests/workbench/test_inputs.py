"""Inputs that a machine makes up: a result, or a line that says what is wrong; never a stack trace.

Inputs that nobody has thought of are met here alone.
TRUST_EXAMPLES in the environment is how many of each kind; by default 20, the same every time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from binarize import formats
from fairseq_posenc import registry, specs
from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.glue.definitions import TASKS
from fairseq_posenc.tokens import subwords
from fairseq_posenc.tokens.squad_file import read_by_id, read_squad
from fairseq_posenc.workbench.experiments.variants import parse_variants
from fairseq_posenc.workbench.finetuning.squad.score import evaluate, list_missing
from glue import read_examples
from tests.helpers.commands import new_directory
from tests.helpers.preprocess import binarize

EXAMPLES = os.environ.get("TRUST_EXAMPLES")
how: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": [*HealthCheck]}
made_up = settings(max_examples=int(EXAMPLES or 20), derandomize=not EXAMPLES, **how)


@contextmanager
def result_or_line() -> Iterator[None]:
    """Let a user's mistake pass, if it is one readable line."""
    try:
        yield
    except UserError as error:
        message = str(error)
        assert 0 < len(message) < 21_000
        assert "\n" not in message


NUMBERS = ["0", "-1", "1", "3", "8", "1e308", "nan", "inf", "-inf", "10" * 20, "0.5", "1e-300"]
option_values = st.sampled_from([*NUMBERS, "true", "false", "half", "yarn:4", "ntk:1e308"])
encodings = st.sampled_from(registry.names())


def with_options(name: str) -> st.SearchStrategy[str]:
    names = st.sampled_from([*registry.options(name), "bass"])
    pairs = st.dictionaries(names, option_values, max_size=2).map(dict.items)
    return pairs.map(lambda found: f"{name}({','.join(map('='.join, found))})")


# Those that can be read, or nearly.
written_specs = st.lists(encodings.flatmap(with_options), min_size=1, max_size=3).map("+".join)
words = st.sampled_from([*registry.names(), "reset", "causal", "+", "(", ")", ",", "=", " ", "x"])
texts = st.one_of(st.text(max_size=80), st.lists(words, max_size=12).map("".join))


@made_up
@given(st.one_of(texts, written_specs))
def test_a_made_up_spec_is_read_or_refused_in_a_line(text):
    with result_or_line():
        spec = specs.parse(text)
        assert specs.parse(str(spec)) == spec
    with result_or_line():
        parse_variants(text)


LONGEST = 12  # positions of the stacks


@made_up
@given(
    spec=st.one_of(written_specs, encodings),
    width=st.sampled_from([8, 12, 16]),
    heads=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 3),
    length=st.integers(1, LONGEST),
    causal=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_any_sizes_and_masks_give_numbers(spec, width, heads, batch, length, causal, dtype, seed):
    """Padding of any kind, whole rows of it as well: outputs and gradients are finite numbers."""
    layer = None
    with result_or_line():
        positions = StackPositions(spec, width, heads, LONGEST, causal).to(dtype)
        layer = SelfAttention(positions).to(dtype)
    if layer is None:
        return
    torch.manual_seed(seed)
    x = torch.randn(batch, length, width, dtype=dtype, requires_grad=True)
    padding = torch.rand(x.shape[:2]) < 0.4
    if positions.has_window or positions.has_tables:  # refuses padding between tokens
        padding = padding.sort(dim=1, descending=seed % 2 == 0).values
    padding[0] = seed % 3 == 0  # or an empty sentence
    embedded, shared = positions(x, padding)
    out, _ = layer(embedded, shared)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    assert out.isfinite().all()
    out.float().square().sum().backward()
    assert x.grad.isfinite().all()


@made_up
@given(
    width=st.integers(-2, 40),
    heads=st.integers(-2, 40),
    positions=st.sampled_from([-1, 0, 1, 3, 7]),
    spec=encodings,
)
def test_sizes_that_cannot_be_are_refused_in_a_line(width, heads, positions, spec):
    wrong = min(width, heads, positions) < 1 or width % heads
    message = "must be at least 1, not -?[0-9]+$|^width .* cannot be divided among"
    with pytest.raises(UserError, match=message) if wrong else result_or_line():
        SelfAttention(StackPositions(spec, width, heads, positions))


ODD = ["", "\0", "\ufeff", "\u202eabc", "שלום עולם", "👩‍👩‍👧", "a" * 100_000]
odd = st.sampled_from([*ODD, "\u2028", "\x1a", "e\u0301"])
lines = st.lists(st.one_of(odd, st.text(max_size=40)), max_size=8)
files = st.one_of(
    st.binary(max_size=200),
    lines.map(lambda found: "\n".join(found).encode("utf-8", "surrogatepass")),
)


def written(content: bytes | str) -> Path:
    """Return a new file."""
    path = new_directory() / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@made_up
@given(files)
def test_a_made_up_text_becomes_data_or_is_refused_in_a_line(content):
    path = written(content)
    with result_or_line():
        binarize(formats.plain, "--words", "--train", path, "--out", path.with_name("out"))
        assert (path.with_name("out") / "train.bin").exists()


cells = st.sampled_from(["0", "1", "x", "", "a\tb", '"', "\0", "é", "-1", "5.000", "nan"])
rows = st.lists(st.lists(cells, max_size=6).map("\t".join), max_size=6).map("\n".join)


@made_up
@given(st.one_of(files, rows), st.sampled_from(list(TASKS)), st.sampled_from(["train", "test"]))
def test_a_made_up_file_of_glue_is_read_or_refused_in_a_line(content, task, split):
    with result_or_line():
        found = read_examples(written(content), TASKS[task], split)
        assert len({len(column) for column in found.sentences}) == 1


ANSWER = {"text": "b", "answer_start": 2}
QUESTION = {"id": "1", "question": "?", "answers": [ANSWER]}
PARAGRAPH = {"context": "a b c", "qas": [QUESTION]}
SQUAD = {"version": "1.1", "data": [{"paragraphs": [PARAGRAPH]}]}
keys = st.sampled_from([*SQUAD, "paragraphs", *PARAGRAPH, *QUESTION, *ANSWER, "a"])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
values = st.recursive(
    leaves | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=20,
)


@st.composite
def changed(draw: Any, usual: Any) -> Any:
    """Return a JSON value in which anything may stand in place of something."""
    if draw(st.integers(0, 15)) == 0:
        return draw(values)
    if isinstance(usual, dict):
        return {key: draw(changed(value)) for key, value in usual.items()}
    return [draw(changed(value)) for value in usual] if isinstance(usual, list) else usual


@made_up
@given(changed(SQUAD) | values, st.just({"1": "b"}) | values)
def test_a_made_up_file_of_squad_is_scored_or_refused_in_a_line(content, predictions):
    path = written(json.dumps(content))
    answers = written(json.dumps(predictions))
    with result_or_line():
        read_by_id(answers, float)
    with result_or_line():
        squad = read_squad(path)
        found = read_by_id(answers, str)
        if squad.answered and not list_missing(squad, found):
            evaluate(squad, found)


@made_up
@given(st.one_of(values.map(json.dumps), st.just("[" * 9999)), st.text(max_size=30))
def test_made_up_files_of_gpt2_are_read_or_refused_in_a_line(encoder, merges):
    paths = (written(encoder), written(merges.encode("utf-8", "replace")))
    with result_or_line():
        subwords._load(*paths)
