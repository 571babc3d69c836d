"""Benchmarks: a time, size or count that is not what a row says, a script that does not start."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import attention
import repeated_rows
import survive
from fairseq_posenc import registry
from fairseq_posenc.backends import available, equation
from fairseq_posenc.checkpoints.state_dict_adapter import COPY_NAME
from fairseq_posenc.errors import UserError
from generate import relative_speed
from measuring import commands, families, flops, page, timing
from measuring.compare import compare
from measuring.contenders import STOCK, Contender, backend_names, contenders
from measuring.scopes import SCOPES, layer, operation
from tests.helpers.commands import Run, run

# fairseq's of hydra, and torch's of FlexAttention that is not compiled.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

CPU, SIZE = torch.device("cpu"), families.Size(32, 4, 48, 3)
TINY = families.Case(16, 2, 0.1, torch.float32, CPU, size=SIZE, vocabulary=50)
QUICKLY = 3, 60.0  # rounds and seconds


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(timing, "MIN_SECONDS", 0.005)


@pytest.mark.parametrize(("mode", "dropout"), [("forward", 0.0), ("training", 0.1)])
@pytest.mark.parametrize("scope", SCOPES)
def test_every_scope_and_mode_gives_whole_rows(scope, mode, dropout):
    found = compare(scope, TINY._replace(mode=mode, dropout=dropout), ["m4m"], ["auto"], *QUICKLY)
    assert [row["encoding"] for row in found] == ["stock", "none", "m4m"]
    assert found[0]["memory_ratio"] == found[1]["ratio_to_none"] == 1.0
    for row in found:
        assert (row["scope"], row["mode"]) == (scope, mode)
        assert row["backend"] in (*available(), "fairseq")
        figures = ("seconds", "memory", "ratio", "ratio_to_none", "memory_ratio")
        assert min(row[name] for name in figures) > 0


def test_all_encodings_and_backends_can_compete():
    names = TINY.encodings(["all"])
    assert names == registry.names(encoder=True)
    found = contenders(names, backend_names(["all"]), TINY.dims, TINY.call)
    assert {contender.encoding for contender in found} == set(names)
    assert {"sdpa", "reference"} <= {contender.backend for contender in found}
    for contender in found:
        for scope in (operation, layer):
            scope(contender, TINY)()


def test_fairseqs_layer_calls_scaled_dot_product_attention():
    """The documentation says so, and the scope ``op`` rests on it."""
    for case in (TINY, TINY._replace(mode="forward", dropout=0.0)):
        run = layer(STOCK, case)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            run()
        called = [event.name for event in profiled.events() or ()]
        assert called.count("aten::scaled_dot_product_attention") == 1


def test_the_peak_is_that_of_known_allocations():
    def run() -> None:
        first, second = torch.zeros(1_000_000), torch.zeros(2_000_000)
        del first
        third = torch.zeros(500_000)
        del second, third

    first, again = (timing.peak(run, CPU) for _ in range(2))
    assert first == again == pytest.approx(4 * 3_000_000, rel=1e-3)


@pytest.mark.parametrize("name", ["m4m", "m4", "shaw", "deberta"])
def test_weights_have_no_denormal_numbers(name, monkeypatch):
    """Processors are slow at them, so a comparison with such weights would be one of luck."""
    softmax, are_denormal = equation.softmax, []

    def noted(*given: Any) -> torch.Tensor:
        weights = softmax(*given)
        are_denormal.append((weights > 0) & (weights < torch.finfo(torch.float32).tiny))
        return weights

    monkeypatch.setattr(equation, "softmax", noted)
    case = families.Case(256, 1, 0.0, torch.float32, CPU, "forward")
    for scope in (operation, layer):
        scope(Contender(name, "reference"), case)
    assert [bool(each.any()) for each in are_denormal] == [False, False]


def test_interleaving_runs_all_in_turns_and_drops_the_warm_up(monkeypatch):
    monkeypatch.setattr(timing, "MIN_SECONDS", 0.0)  # so that none is repeated
    order: list[str] = []
    passes = [lambda: order.append("a"), lambda: order.append("b")]
    found = timing.interleaved(passes, CPU, rounds=4)
    assert "".join(order[2 * timing.WARM_UP :]) == "abababab"
    assert len(found) == 4
    assert len(timing.interleaved(passes, CPU, rounds=9, limit=0.0)) == timing.MIN_ROUNDS


def test_ratios_are_medians_in_a_round_and_speeds_against_the_turns_around():
    rounds = [[1.0, 2.0], [10.0, 30.0], [1.0, 9.0]]
    assert (timing.ratio(rounds, 1, 0), timing.median(rounds, 1)) == (3.0, 9.0)
    rounds = [[1.0, 4.0, 3.0, 3.0, 3.0], [2.0, 1.0, 2.0, 2.0, 6.0], [3.0, 1.0, 5.0, 5.0, 1.0]]
    assert [relative_speed(rounds, turn) for turn in (0, 1, 3)] == [1.0, 2.0, 1.0]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_models_compared_differ_in_their_positions_alone(family):
    """With fairseq's own positions a model of ours has the same parameters, in the same places."""
    positions = "learned" if family == "masked_lm" else "sinusoidal(layout=fairseq)"
    both = STOCK, Contender(positions, "reference")
    theirs, ours = (families.build(x, TINY._replace(family=family))[2] for x in both)
    ours.load_state_dict(theirs.state_dict())
    found = [dict(model.named_parameters()) for model in (theirs, ours)]  # what is shared once
    assert len({sum(not COPY_NAME.search(name) for name in names) for names in found}) == 1


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_formula_of_model_flops_counts_the_matrix_products(family):
    """With dropout the CPU's attention is plain products, which torch's counter knows."""
    whole = TINY._replace(family=family, length=24)
    trainer, batch = families.build_trainer(STOCK, whole)
    with FlopCounterMode(display=False) as counter:
        trainer.train_step([batch])
    expected = flops.model_flops(whole, len(trainer.task.source_dictionary))
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_backends_that_cannot_run_or_are_unknown_are_shown(capsys):
    found = compare("op", TINY._replace(dropout=0.0), ["rope"], ["auto", "flex"], *QUICKLY)
    assert "flex" not in {row["backend"] for row in found}
    assert "no row for rope on flex: it runs on a GPU, not on cpu" in capsys.readouterr().err
    with pytest.raises(UserError, match="unknown backend 'fast'; known: auto, all, triton, flex"):
        backend_names(["fast"])


def test_the_page_is_up_to_date_and_kept_figures_fill_it(tmp_path):
    cases = TINY, TINY._replace(length=32)
    kept = [row for case in cases for row in compare("layer", case, ["m4m"], ["auto"], *QUICKLY)]
    (document := tmp_path / "benchmarks.md").write_text(page.PAGE.read_text())
    result = page.Result("some", "attention", "python benchmarks/attention.py", "here", kept)
    page.save_result(result, tmp_path, document)
    (again,) = page.load_results(tmp_path)
    assert again._replace(rows=[]) == result._replace(rows=[])
    assert again.rows[1]["ratio"] == pytest.approx(kept[1]["ratio"], rel=1e-4)
    text, published = document.read_text(), page.PAGE.read_text("utf-8")
    assert text == page.fill_sections(published, [again])
    assert "| encoding | n = 16 | n = 32 |" in text
    # Else: python benchmarks/attention.py --write-docs.
    assert published == page.fill_sections(published, page.load_results())


def script(name: str, *arguments: str, **how: Any) -> Run:
    return run("python", Path(attention.__file__).with_name(name), *arguments, **how)


@pytest.mark.slow
def test_attention_prints_json_and_nothing_else():
    short = ("--scopes", "op", "--lengths", "32", "--rounds", "3", "--encodings", "rope")
    found = json.loads(script("attention.py", *short, "--json").out)
    names = ("mode", "dropout", "device", "length", "batch", "dtype")
    forward, training = ([x[y] for y in names] for x in found if x["encoding"] == "rope")
    assert forward == ["forward", 0.0, "cpu", 32, 1, "float32"]
    assert training == ["training", 0.1, "cpu", 32, 1, "float32"]


@pytest.mark.matrix  # scripts like others
def test_generate_and_train_print_their_rows():
    tiny = ("--size", "tiny", "--rounds", "3", "--encodings", "rope", "--length", "12", "--json")
    generated = json.loads(script("generate.py", *tiny).out)
    assert [row["encoding"] for row in generated] == ["sinusoidal", "stock", "rope"]
    assert all(row["tokens_per_second"] > 0 and row["beam"] == 5 for row in generated)
    assert generated[0]["ratio"] == 1.0
    trained = json.loads(script("train.py", *tiny, "--family", "translation").out)
    assert [row["encoding"] for row in trained] == ["stock", "none", "rope"]
    assert all(0 < row["utilization"] < 1 for row in trained)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_survives_has_learned(family, tmp_path, monkeypatch, capsys):
    (path := tmp_path / "text").write_text("a b c d e f g " * 300)
    words = "survive.py --json --encodings rope --backends reference --updates 20 --length 16 "
    words += f"--batch 4 --dropout 0 --dtype bfloat16 --families {family} --text {path}"
    monkeypatch.setattr(sys, "argv", words.split())
    survive.main()
    rows = json.loads(capsys.readouterr().out)
    assert [row["encoding"] for row in rows] == ["none", "rope"]
    for row in rows:
        assert (row["family"], row["finite"]) == (family, True)
        assert 9 < row["first"] > row["last"] + 1  # bits: at first, words are unknown
    path.write_text("a b c " * 12)
    two = TINY._replace(vocabulary=survive.SPECIAL_SYMBOLS + 2)  # and all others are unknown
    assert survive.read_words(path, two).tolist() == [4, 5, 3] * 12
    with pytest.raises(UserError, match="has 36 words; a batch needs 66"):
        survive.main()


def test_what_fairseq_stops_does_not_survive(tmp_path, monkeypatch, capsys):
    def build_trainer(*given, **named):
        trainer, batch = families.build_trainer(*given, **named)
        factors = iter([1.0, torch.nan])  # the second update is not made
        next(trainer.model.parameters()).register_hook(lambda gradient: gradient * next(factors))
        return trainer, batch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(survive, "build_trainer", build_trainer)
    (tmp_path / "checkpoints").mkdir()  # where fairseq would write its `crash.pt`
    row = survive.survive(Contender("rope", "reference"), TINY, 3, None)
    assert (row["skipped"], row["finite"], row["first"] > 0) == (0, False, True)
    commands.print_rows(repeated_rows.parse_args(["--json"]), [{"first": torch.nan}], str)
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [*tmp_path.rglob("*")] == [tmp_path / "checkpoints"]


def test_layers_have_the_type_and_the_batch_of_the_options():
    args = repeated_rows.parse_args(["--dtype", "bfloat16", "--batch", "3"])
    case = families.Case.from_args(args, length=8)
    inputs: list[Any] = []
    with nn.modules.module.register_module_forward_pre_hook(lambda _, given: inputs.extend(given)):
        repeated_rows.build_step("shaw", case)()
        repeated_rows.build_deberta_v2(case)()
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.dim() == 3]  # no masks
    assert {x.dtype for x in tensors} == {torch.bfloat16}
    assert 3 in tensors[0].shape


@pytest.mark.slow
def test_a_mistake_is_shown_in_one_line():
    done = script("transformers_host.py", "--layers", "1", "--specs", "nonsense", fails=True)
    assert re.fullmatch(r"error: unknown position encoding 'nonsense'.*\n", done.err)
