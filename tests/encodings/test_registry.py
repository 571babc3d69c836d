"""Specs: what can be written, what is refused and how."""

from __future__ import annotations

import re
import time
from typing import Any, Literal, Optional

import pytest

from fairseq_posenc import registry, specs
from fairseq_posenc.assembly import count_parameters
from fairseq_posenc.encodings import base
from fairseq_posenc.encodings.base import Dims, Encoding
from fairseq_posenc.encodings.biases import Alibi, Kerple
from fairseq_posenc.errors import UserError
from tests.helpers.formulas import build


def test_there_are_encodings():
    some = {"none", "learned", "sinusoidal", "sentence_learned", "m4", "m4m", "rope"}
    assert some <= {*registry.names()}


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("learned", "learned"),
        (" learned + m4m( max_distance = 128 ) ", "learned+m4m(max_distance=128)"),
        ("m4(per_head=TRUE,scale_factor=2)", "m4(per_head=true,scale_factor=2)"),
        ("m4+reset", "m4(reset=true)"),
        ("learned+shaw+m4(per_head=true)+reset", "learned+m4(per_head=true,reset=true)+shaw"),
        ("rope(scaling=yarn:4.0,layout=half)", "rope(layout=half,scaling=yarn:4)"),
        ("rope(base=10000,scaling=linear:1)", "rope"),
        ("m4(reset=true)+reset", "m4(reset=true)"),
        ("m4(reset=false,max_distance=3,)", "m4(max_distance=3)"),
        ("alibi+m4m+learned", "learned+alibi+m4m"),
        ("m4m+none", "m4m"),
        ("none", "none"),
    ],
)
def test_canonical_form(text, canonical):
    spec = specs.parse(text)
    assert str(spec) == canonical
    assert specs.parse(canonical) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read position encoding ''"),
        ("learned+", "cannot read position encoding"),
        ("rope alibi", "cannot read position encoding 'rope alibi': expected names joined by"),
        ("alibi+m4m(max_distance=128", r"brackets of 'm4m\(max_distance=128' do not match"),
        ("rope(base=3,layout=half", r"brackets of 'rope\(base=3' do not match"),
        ("ALiBi", "unknown position encoding 'ALiBi': did you mean alibi"),
        ("2*rope,alibi+deberta-v2", "encoding 'deberta-v2': did you mean deberta_v2"),
        ("rotary", "did you mean rope"),
        ("YaRN:2", r"did you mean rope\(scaling=yarn:2\)"),
        ("own+alibi", "own, in lower case, keeps a model's positions, in transformers alone"),
        ("roep", "unknown position encoding 'roep': did you mean rope"),
        ("quantum", "unknown position encoding 'quantum': `fairseq-posenc list` shows all"),
        ("m4m(reach=3)", "m4m has no option 'reach=3': its options: max_distance, per_head"),
        ("rope+rope(bas=3)", "rope has no option 'bas=3': did you mean base"),
        ("rope+window(512)", r"window\(512\): write NAME=VALUE; its options: size, first, prefill"),
        ("none(x=1)", "none has no option 'x=1': its options: none"),
        ("rope+window(width=3)", "window has no option 'width=3': its options: size"),
        ("m4m(max_distance=many)", r"m4m\(max_distance=many\): expected a whole number"),
        ("m4m(scale_factor=big)", "expected a number"),
        ("m4m(per_head=1)", "write true or false"),
        ("rope(layout=hlaf)", r"did you mean half\? choose one of interleaved, half"),
        ("learned+sinusoidal", "learned and sinusoidal both act on the input; choose one"),
        ("none+learned", "none and learned both act on the input"),
        ("m4m+m4m", "m4m is named twice"),
        ("m4(reset=true,reset=true)", r"m4\(reset=true,reset=true\): reset is set twice"),
        ("m4(max_distance=3,max_distance=4)", "max_distance is set twice"),
        ("m4(max_distance=3,,)", r"m4\(max_distance=3,,\): write NAME=VALUE"),
        ("m4(reset=false)+reset", "contradict each other"),
        ("m4+reset(x=1)", "reset has no option 'x=1'"),
        ("reset", "reset must follow an encoding that has it: "),
        ("learned+reset", "reset must follow an encoding that has it: "),
        ("rope,rope+xpos", "both act on the rotation"),
        ("learned,sinusoidal", "both act on the input"),  # which is of the whole stack
        ("m4+m4(max_distance=3)", "is named twice"),
    ],
)
def test_bad_specs_are_refused_in_words(text, message):
    with pytest.raises(UserError, match=message):
        specs.parse(text)


def test_a_new_class_is_an_encoding_with_its_typed_options(monkeypatch):
    monkeypatch.setitem(base.ENCODINGS, "made_up", base.Encoding)  # taken out again in the end
    del base.ENCODINGS["made_up"]

    @base.register("made_up")
    class MadeUp(Encoding):
        acts_on = "scores"

        def __init__(self, dims: Dims, *, width: Optional[int] = None, height: int | None = None):
            super().__init__(dims)
            self.sizes = width, height

    (built,) = build("made_up(width=3,height=4)", Dims(16, 2, 8)).as_list()
    assert built.sizes == (3, 4)
    for name in ("width", "height"):
        with pytest.raises(UserError, match="expected a whole number"):
            specs.parse(f"made_up({name}=wide)")
    assert "made_up" in registry.names()
    with pytest.raises(UserError, match="two encodings are called 'made_up': rename one"):
        base.register("made_up")(type("Other", (MadeUp,), {}))
    for name in ("with+plus", "two words", "terms"):
        with pytest.raises(UserError, match=f"no encoding can be called {re.escape(repr(name))}"):
            base.register(name)(MadeUp)


def test_a_class_that_is_defined_again_replaces_the_first():
    for parent, parameters in ((Kerple, 4), (Alibi, 0)):
        base.register("again")(type("Again", (parent,), {}))
        assert sum(count_parameters(specs.parse("again"), Dims(16, 2, 8), 1).values()) == parameters
    del base.ENCODINGS["again"]


def test_options_of_a_base_class_come_first_and_may_be_left_out(monkeypatch):
    class Mixin:
        pass

    class MadeUp(Mixin, Alibi):
        without_options = ("axes",)

        def __init__(
            self,
            dims: Dims,
            *,
            kind: str = "a",
            mode: Literal["asymmetric", "symmetric"] = "asymmetric",
            **others: Any,
        ) -> None:
            super().__init__(dims, mode=mode, **others)

    monkeypatch.setitem(base.ENCODINGS, "made_up", MadeUp)
    options = registry.options("made_up")
    assert [*options] == ["mode", "scale_factor", "kind"]
    assert options["mode"].default == "asymmetric"


@pytest.mark.parametrize(
    ("text", "causal", "allowed"),
    [
        ("m4m(max_distance=0)", False, r"max_distance=0\): must be from 1 to 1,000,000, not 0"),
        ("rope(fraction=0.1)", False, "0.1 of a head of size 8 is 0 coordinates"),
        ("rope(scaling=yarn)", False, "write none or KIND:F"),
        ("rope(scaling=linear:0.5)", False, "a factor F of at least 1"),
        ("m4(scale_factor=0)", False, "from 1e-06 to 1,000,000,000,000, not 0"),
        ("m4(scale_factor=-1)", False, "must be from 1e-06 to"),
        ("t5(scale_factor=nan)", False, "must be from 1e-06 to"),
        ("m1(max_distance=-3)", False, r"max_distance=-3\): must be from 1 to 1,000,000, not -3"),
        ("deberta_v2(buckets=0)", False, r"buckets=0\): must be from 1 to"),
        ("deberta_v2(buckets=1)", False, "buckets must be at least 2"),
        ("tupe_shared(num_buckets=1)", False, "a multiple of 4"),
        ("tupe_shared(max_distance=4)", False, "more than the 8 exact distances"),
        ("fire(width=0)", True, r"width=0\): must be from 1 to"),
        ("fire(threshold=0)", True, "must be from 1e-06 to"),
        ("rope(base=0)", False, "must be from 1e-06 to"),
        ("rope(base=-5)", False, "must be from 1e-06 to"),
        ("rope(base=1,scaling=yarn:2)", False, "the base must be more than 1"),
        ("pope(base=1)", False, r"pope\(base=1\): the base must be more than 1"),
        ("rope(fraction=0.25,scaling=ntk:2)", False, "rotate at least 4"),
        ("rope(scaling=linear:inf)", False, "at most 1,000,000"),
        ("rope(scaling=ntk:1e308)", False, "at most 1,000,000"),
        ("rope(fraction=1e308)", False, "must be from 1e-06 to 1,000,000,000,000"),
        ("rope(fraction=1e11)", False, "of a head of size 8 is 800000000000 coordinates"),
        ("m4m(max_distance=1000000000000)", False, "must be from 1 to 1,000,000"),
        ("m4(scale_factor=1e-300)", False, "must be from 1e-06 to"),
        ("rope(base=1e300)", False, "must be from 1e-06 to"),
    ],
)
def test_values_without_a_meaning_are_refused_in_one_line(text, causal, allowed):
    with pytest.raises(UserError, match=allowed) as refused:
        build(text, Dims(16, 2, 8, causal))
    assert "\n" not in str(refused.value)


SIZES = [("width", Dims(0, 1, 8)), ("heads", Dims(8, 0, 8)), ("heads", Dims(8, -8, 8))]
SIZES += [("positions", Dims(8, 2, 0)), ("positions", Dims(8, 2, -1))]
SIZES += [("length in training", Dims(8, 2, 8, pretrained_length=0))]


@pytest.mark.parametrize(("what", "dims"), SIZES)
def test_sizes_below_one_are_refused_in_one_line(what, dims):
    with pytest.raises(UserError, match=f"{what} must be at least 1, not"):
        build("learned+rope", dims)


LONG = {
    "twice": "+".join(["m4m"] * 30_000),
    "plus": "+" * 100_000,
    "a name": "x" * 1_000_000,
    "a number": f"m4m(max_distance={'1' * 6000})",
    "an option": f"rope({'a' * 100_000}=1)",
    "open": "m4m(" * 30_000,
    "spaces": " " * 100_000,
    "just short enough": "+".join(["m4m"] * 250),
    "a long number": f"m4m(max_distance={'1' * 900})",
    "a long option": f"rope({'a ' * 400}=1)",
    "a long value": f"rope(layout={'a ' * 400})",
    "a long scaling": f"rope(scaling={'a ' * 400})",
    "a long truth": f"m4(reset={'a ' * 400})",
    "a long factor": f"m4(scale_factor={'1' * 900})",
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_long_texts_are_refused_at_once_and_quoted_in_part(text):
    began = time.process_time()
    with pytest.raises(UserError) as refused:
        specs.parse(text)
    assert time.process_time() - began < 5  # what grows by the square takes minutes
    assert len(str(refused.value)) < 700
    assert "\n" not in str(refused.value)


def test_any_message_quotes_endless_words_in_part():
    message = str(UserError(f"--data {'x' * 100_000}: no such folder"))
    assert message.endswith("xxx... (100,001 characters) no such folder")
    path = "/folder" * 500
    assert str(UserError(path)) == path


def test_what_fits_an_encoder_is_what_can_be_built_for_one():
    for name in registry.names():
        build(name, Dims(16, 2, 8, causal=True))
        if name in registry.names(encoder=True):
            build(name, Dims(16, 2, 8))
        else:
            with pytest.raises(UserError, match=f"{name} is for causal models"):
                build(name, Dims(16, 2, 8))
