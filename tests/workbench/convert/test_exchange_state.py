"""Exported models hold nothing that only a constructor fills, in any precision and any version."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys

import pytest
import torch
import transformers

from fairseq_posenc.workbench.convert.exchange.config_json import ARCHITECTURES
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import (
    SPECS,
    exported_config,
    exported_inputs,
    exported_model,
    head_of,
)
from tests.helpers.products import product_of, some_of
from tests.workbench.convert.exchange_trainer import memory_of_nan
from tests.workbench.convert.test_exchange import AUTO, exported_copy

# A folder with transformers 5 and what it needs, to stand first in PYTHONPATH.
VERSION_5 = os.environ.get("POSENC_TRANSFORMERS5", "")
READER = """
import sys, torch, transformers
folder, auto, inputs, out, kwargs = torch.load(sys.argv[1], weights_only=False)
model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **kwargs).eval()
assert transformers.__version__.startswith("5."), transformers.__version__
with torch.no_grad():
    torch.save(model(**inputs).logits, out)
"""
FOLDERS = [
    ("causal_lm", "xpos+ssmax"),
    ("causal_lm", "rope+window(size=4),none+ssmax"),
    ("causal_lm", "rope(layout=half,scaling=dynamic:2)+chunk(size=4)"),
    ("causal_lm", "learned+randomized(limit=60)+sink(value=0.5)"),
    ("masked_lm", "rope(scaling=yarn:4)+logn(length=4)"),
    ("masked_lm", "pope+fox"),
    ("masked_lm", "sinusoidal(layout=fairseq)+window(size=5)"),
    ("translation", "m4+rope(cross_attention=true)"),
]


def scores(model, head, side="right"):
    with torch.no_grad():
        output = model(**exported_inputs(head, side))
    return output.start_logits if head == "spans" else output.logits


MODELS = [
    *((head_of(spec), spec) for spec in SPECS),
    *((head, "rope+m4m+window(size=4)") for head in ARCHITECTURES),
    *(("translation", spec) for spec in ("m4+rope(cross_attention=true)", "fox", "learned+t5")),
]
# Each way in which an encoding computes: angles, decay, tables, biases, counts, numbers drawn.
SOME = [
    *("rope", "xpos", "pope+fox", "sinusoidal(layout=fairseq)", "alibi", "fire", "cope", "m4m"),
    *("rope(scaling=yarn:4)", "rope(scaling=longrope:2:short=1/1.5/2/3:long=1/2/3/4)"),
    *("kerple+sink(value=0.5)", "sandwich", "rope+ssmax", "learned+randomized(limit=60)"),
    *(
        "t5+window(size=3)",
        "rope+llama4(length=4)",
        "rope+logn(length=4)",
        "tupe_shared(reset=true)",
    ),
]
# The stack of an exported model is the library's, which tests/test_state.py tries with all others.
CHOSEN = some_of(
    [case for case in MODELS if case[1] in SOME or case not in MODELS[: len(SPECS)]], MODELS
)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("head", "spec"), CHOSEN)
def test_a_model_built_without_memory_is_the_same(head, spec):
    """As transformers 5 builds it, and as ``to_empty`` of FSDP2 leaves it."""
    model = exported_model(head, spec)
    assert not [name for name, _ in model.named_buffers()]
    with torch.device("meta"):
        other = type(model)(exported_config(head, spec))
    with memory_of_nan():
        other = other.to_empty(device="cpu").eval()
    other.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(scores(other, head), scores(model, head))


@pytest.mark.parametrize(
    ("spec", "dtype"),
    product_of(some_of(SOME, SPECS), [torch.float64, torch.bfloat16, torch.float16]),
)
def test_torchs_default_type_changes_nothing(spec, dtype):
    head = head_of(spec)
    model = exported_model(head, spec)
    with default_dtype(dtype):
        other = type(model)(exported_config(head, spec)).float().eval()
        other.load_state_dict(model.state_dict(), strict=True)
        found = scores(other, head)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, scores(model, head))


@pytest.mark.parametrize(
    ("spec", "dtype"),
    product_of(some_of(SOME, SPECS), [torch.float16, torch.bfloat16, torch.float64]),
)
def test_another_precision_is_near_this_one(spec, dtype):
    head = head_of(spec)
    model = exported_model(head, spec)
    found = scores(copy.deepcopy(model).to(dtype), head)
    assert found.dtype == dtype
    wanted = scores(model, head)
    allowed = {torch.float16: 0.02, torch.bfloat16: 0.15, torch.float64: 1e-5}[dtype]
    real = exported_inputs(head)["attention_mask"].bool()
    gap = (found.double() - wanted.double())[real].abs().max()
    assert gap < allowed * wanted[real].abs().max()


@pytest.mark.parametrize(
    ("spec", "dtype"),
    product_of(SOME, [torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_a_model_that_is_saved_and_read_is_the_same_bit_for_bit(spec, dtype):
    """And its constants are not of the type that transformers builds it in."""
    head, out = head_of(spec), new_directory() / "saved"
    model = exported_model(head, spec).to(dtype)
    model.save_pretrained(out)
    other = type(model).from_pretrained(out, dtype=dtype).eval()
    assert {weight.dtype for weight in other.parameters()} == {dtype}
    state, read = model.state_dict(), other.state_dict()
    assert state.keys() == read.keys()
    assert all(torch.equal(state[name], read[name]) for name in state)
    # Sums over memory that begins elsewhere may be rounded otherwise.
    torch.testing.assert_close(scores(other, head), scores(model, head))
    again = new_directory() / "again"
    other.save_pretrained(again)
    names = ("model.safetensors", "config.json")
    assert [(out / name).read_bytes() for name in names] == [
        (again / name).read_bytes() for name in names
    ]


@pytest.mark.parametrize(("head", "spec", "use_reentrant"), product_of(CHOSEN, [True, False]))
def test_both_kinds_of_checkpointing_have_the_gradients_of_none(head, spec, use_reentrant):
    model = exported_model(head, spec, dropout=0.1, attention_dropout=0.1)
    inputs = exported_inputs(head)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.zero_grad()
        torch.manual_seed(1)  # for dropout
        output = model.train()(**inputs)
        output = output.start_logits if head == "spans" else output.logits
        real = inputs["attention_mask"].bool()
        (output if head == "classes" else output[real]).square().mean().backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    before, after = gradients
    assert any(gradient is not None for gradient in before.values())
    for name, gradient in before.items():
        if gradient is None:
            assert after[name] is None, name
        else:
            torch.testing.assert_close(after[name], gradient, msg=name)


@pytest.mark.parametrize(
    ("family", "spec", "options"),
    product_of(
        some_of(FOLDERS[::3], FOLDERS), [{}, {"low_cpu_mem_usage": True}, {"dtype": "auto"}]
    ),
)
def test_a_folder_is_read_as_it_was_written(family, spec, options):
    folder = exported_copy(family, spec)
    auto = getattr(transformers, AUTO[family])
    whole = auto.from_pretrained(folder, trust_remote_code=True).eval()
    with memory_of_nan():
        model = auto.from_pretrained(folder, trust_remote_code=True, **options).eval()
    torch.testing.assert_close(scores(model, family), scores(whole, family))


@pytest.mark.skipif(not VERSION_5, reason="POSENC_TRANSFORMERS5 names no folder of transformers 5")
@pytest.mark.parametrize(("family", "spec"), FOLDERS)
def test_version_5_reads_the_same(family, spec):
    folder, place = exported_copy(family, spec), new_directory()
    model = getattr(transformers, AUTO[family]).from_pretrained(folder, trust_remote_code=True)
    job = (str(folder), AUTO[family], exported_inputs(family), str(place / "out"), {})
    torch.save(job, place / "job")
    names = {"PYTHONPATH": VERSION_5, "HF_MODULES_CACHE": str(place / "modules")}
    subprocess.run(
        [sys.executable, "-c", READER, str(place / "job")],
        env={**os.environ, **names},
        cwd=place,
        check=True,
    )
    torch.testing.assert_close(torch.load(place / "out"), scores(model.eval(), family))


class Scores(torch.nn.Module):
    """A model whose output is a tensor."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, mask):
        return self.model(tokens, attention_mask=mask).logits


def draw_batch(rows, length, side):
    tokens = torch.randint(4, 44, (rows, length))
    if rows > 1 and length > 2:
        tokens[1, -2:] = 1
    tokens = tokens.flip(1) if side == "left" else tokens
    return tokens, tokens.ne(1).long()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "spec"),
    [
        ("masked_lm", "rope+window(size=14,first=3),none+ssmax"),
        ("causal_lm", "rope(scaling=dynamic:2)+chunk(size=6)"),
    ],
)
def test_an_exported_program_is_the_model_at_any_size(head, spec):
    """Traced at seven tokens, over which the windows reach; fewer, one, and eight times as many."""
    model = Scores(exported_model(head, spec, max_positions=64)).eval()
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    example = draw_batch(2, 7, "right")
    program = torch.export.export(model, example, dynamic_shapes=(dynamic, dynamic)).module()
    for length in (1, 2, 3, 7, 8, 15, 56):
        for rows in (1, 2, 5):
            for side in ("left", "right"):
                tokens, mask = draw_batch(rows, length, side)
                found, wanted = program(tokens, mask), model(tokens, mask)
                torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()])
