"""Pictures show the numbers that they are of."""

from __future__ import annotations

import cmath
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.capture_attention import capture_attention
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.plots import drawings
from fairseq_posenc.workbench.plots.command import KINDS
from fairseq_posenc.workbench.plots.subject import build_subject, collect_subjects
from tests.helpers import commands
from tests.helpers.products import product_of, some_of
from tests.helpers.tiny_models import (
    ARCHITECTURES,
    STOCK,
    encoding_specs,
    logits,
    make_model,
    make_tokens,
    needs_causal,
)

PAD = 1
ALL = range(4)


def image(axes) -> np.ndarray:
    (found,) = axes.images
    return found.get_array()


def panels(figure) -> list:
    """Return the panels of a figure, without the scales of colors beside them."""
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def drawn_lines(axes) -> np.ndarray:
    return np.array([line.get_ydata() for line in axes.lines[:-1]])  # the last marks distance 0


def assert_same(shown, tensor, **tolerance):
    found = torch.as_tensor(np.asarray(shown)).double()
    torch.testing.assert_close(found, tensor.detach().double(), **tolerance)


def spec_subject(spec: str, causal: bool = False, **shown):
    return replace(build_subject(spec, 32, 4, 24, causal or needs_causal(spec)), **shown)


def tables_drawn(subject):
    found = drawings.collect_tables(subject)
    for axes, table in zip(panels(drawings.draw_tables(subject)), found):
        assert_same(image(axes), table.values)
        assert (axes.get_xlabel(), axes.get_ylabel()) == (table.column_label, table.row_label)
    return {table.title: table for table in found}


class TestTables:
    def test_a_models_tables_are_shown(self):
        model = make_model("masked_lm", position_encoding="learned+shaw")
        stack, state = model.encoder.sentence_encoder, torch.get_rng_state()
        found = tables_drawn(replace(collect_subjects(model)["encoder"], shown_layers=[0, 2]))
        assert torch.equal(torch.get_rng_state(), state)
        assert list(found) == ["at the input", "query table, layer 1", "query table, layer 3"]
        at_input = stack.embed_positions.encodings["learned"].table.weight
        assert_same(found["at the input"].values, at_input)
        for layer in (0, 2):
            table = found[f"query table, layer {layer + 1}"]
            own = stack.layers[layer].self_attn.encodings["shaw"].table
            assert_same(table.values, own.weight[0])
            assert table.rows.tolist() == list(range(-23, 24))

    def test_a_causal_stack_has_no_rows_of_later_keys(self):
        (table,) = tables_drawn(spec_subject("m4", causal=True)).values()
        assert table.title == "query table and key table, layer 1"
        assert table.rows.tolist() == list(range(-23, 1))

    def test_clipped_ends_and_rows_of_a_reset_are_left_out(self):
        subject = spec_subject("m4(max_distance=3,reset=true)")
        (table,) = tables_drawn(subject).values()
        assert table.rows.tolist() == list(range(-3, 4))
        assert_same(table.values, subject.by_layer[0].encodings["m4"].table.weight[0])

    def test_heads_have_tables_of_their_own(self):
        subject = spec_subject("shaw(per_head=true)", shown_heads=[1, 3])
        found = drawings.collect_tables(subject)
        weight = subject.by_layer[0].encodings["shaw"].table.weight
        assert [table.title[-6:] for table in found] == ["head 2", "head 4"]
        for head, table in zip((1, 3), found):
            assert_same(table.values, weight[head])

    def test_numbers_of_heads_are_columns(self):
        (table,) = tables_drawn(spec_subject("t5")).values()
        assert (table.column_label, table.heads) == ("head", ["1", "2", "3", "4"])
        assert "all layers" in table.title
        (table,) = tables_drawn(spec_subject("raffel")).values()
        assert (table.column_label, table.heads) == ("head", ["all"])  # they share its numbers

    @pytest.mark.parametrize(
        "spec",
        some_of(
            [spec for spec in encoding_specs("input", "scores") if "(" not in spec],
            encoding_specs("input", "scores"),
        ),
    )
    def test_every_encoding_has_tables_but_for_none(self, spec):
        subject = spec_subject(spec)
        if spec == "none" or spec.startswith("fox"):
            with pytest.raises(UserError, match="has no table"):
                drawings.collect_tables(subject)
            return
        assert all(table.values.isfinite().all() for table in tables_drawn(subject).values())

    def test_too_many_are_refused(self):
        subject = build_subject("shaw(per_head=true)", 49 * 2, num_heads=49, max_positions=5)
        with pytest.raises(UserError, match=r"49 panels are too many.*with --layer or --head"):
            drawings.draw_tables(subject)

    @pytest.mark.parametrize("family", STOCK)
    def test_models_of_fairseqs_own_have_no_stacks(self, family):
        assert collect_subjects(make_model(family, STOCK[family])) == {}


class TestMap:
    def test_points_of_a_plane_keep_their_distances(self):
        angles = torch.arange(12) / 12 * 2 * torch.pi
        plane = torch.stack([angles.cos(), angles.sin()], 1).double()
        points = drawings.place_rows(plane @ torch.linalg.qr(torch.randn(5, 5).double())[0][:2])
        distances, expected = torch.cdist(points, points), torch.cdist(plane, plane)
        torch.testing.assert_close(distances, expected, rtol=0.01, atol=0.01)

    def test_points_are_colored_by_position(self):
        (axes,) = panels(drawings.draw_map(spec_subject("learned")))
        (points,) = axes.collections
        assert points.get_array().tolist() == list(range(24))
        assert points.get_offsets().shape == (24, 2)
        assert axes.get_aspect() == 1  # distances are the same in both directions


class TestProducts:
    def test_they_are_those_of_the_vectors_and_of_a_models_projections(self):
        model = make_model("masked_lm", position_encoding="learned")
        stack = model.encoder.sentence_encoder
        subject = replace(collect_subjects(model)["encoder"], shown_layers=[1])
        own, random, projected = panels(drawings.draw_products(subject, reach=5))
        vectors = stack.embed_positions.encodings["learned"].table.weight.detach().double()
        around = range(12 - 5, 12 + 6)
        assert_same(drawn_lines(own), (vectors[7:18] @ vectors[12])[None])
        attend = stack.layers[1].self_attn
        query = (vectors @ attend.q_proj.weight.detach().double().T).view(24, 4, 8)
        key = (vectors @ attend.k_proj.weight.detach().double().T).view(24, 4, 8)
        expected = [[query[12, head] @ key[j, head] for j in around] for head in ALL]
        assert_same(drawn_lines(projected), torch.tensor(expected), rtol=1e-4, atol=1e-5)
        assert drawn_lines(random).shape == (4, 11)

    def test_sinusoids_products_fall_with_the_distance_alone_until_they_are_projected(self):
        own, random = panels(drawings.draw_products(build_subject("sinusoidal", 256, 4, 128), 40))
        (line,) = drawn_lines(own)
        np.testing.assert_allclose(line, line[::-1], atol=1e-3)  # distance-aware, not directed
        assert line[40] == line.max()
        assert np.corrcoef(line[40:], np.arange(41))[0, 1] < -0.85
        for line in drawn_lines(random):
            assert abs(line - line[::-1]).max() > 0.3 * np.ptp(line)


class TestDecay:
    def test_the_bound_is_roformers(self):
        """Of section 3.4.3, at head size 64 and reach 256, by plain loops."""
        spec = "none,rope,rope(base=500)"  # a panel for each kind of layer that rotates
        axes, other = panels(drawings.draw_decay(build_subject(spec, 256, 4, 128)))
        assert [x.get_title()[-5:] for x in (axes, other)] == [" rope", "=500)"]
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("distance", "mean of |S_j|")
        (line,) = drawn_lines(axes)
        frequencies = [10000 ** (-2 * t / 64) for t in range(32)]
        for distance in range(257):
            turns = [cmath.exp(1j * distance * frequency) for frequency in frequencies]
            sums = [abs(sum(turns[:j])) for j in range(1, 33)]
            assert line[distance] == pytest.approx(sum(sums) / 32, abs=1e-3)
        assert len(line) == 257
        assert line[:32].mean() > 1.5 * line[128:].mean()


class TestCurves:
    def test_biases_and_gains_are_the_tables(self):
        subject = spec_subject("m2+t5")
        _, bias, gain = drawings.compute_curves(subject, reach=9)
        assert [bias.title, gain.title] == ["bias, layer 1", "gain, layer 1"]
        assert_same(gain.values, subject.by_layer[0].encodings["m2"].table.weight[:, 14:33])
        assert bias.values.shape == (4, 19)
        table = subject.by_layer[0].shared["t5"].table
        assert_same(bias.values[:, 9], table[:, 0])  # distance 0 has a bucket of its own

    def test_of_a_spec_scores_are_those_of_each_layer(self):
        subject = spec_subject("rope,alibi", shown_heads=[2])
        found = drawings.compute_curves(subject, reach=9)
        titles = [f"score of equal contents, layer {number}" for number in (1, 2)]
        assert [each.title for each in found[:2]] == titles
        for shown, layer in zip(found, subject.by_layer):
            assert_same(shown.values, layer.distance_curve(9)[[2]])

    @pytest.mark.parametrize("family", ARCHITECTURES)
    def test_of_a_model_scores_are_those_of_its_trained_tables(self, family):
        for stack in collect_subjects(make_model(family, position_encoding="t5")).values():
            before, *_ = drawings.compute_curves(stack, reach=6)
            next(stack.by_layer[0].shared.parameters()).data += 1
            after, *_ = drawings.compute_curves(stack, reach=6)
            difference = after.values - before.values
            assert_same(difference, torch.ones_like(difference), atol=1e-5, rtol=0)


def seen_by(family: str, tokens: torch.Tensor, **options):
    model = make_model(family, **options)
    return capture_attention(model, lambda: logits(model, family, tokens))


class TestAttention:
    def test_maps_are_the_weights_and_gray_where_nobody_looks(self):
        tokens = make_tokens()
        tokens[0, -3:] = PAD
        seen = seen_by("masked_lm", tokens, attention_directions="lr")
        padded = tokens[0].eq(PAD)
        words = [f"word{index}" for index in range(9)]
        chosen = [seen[n]._replace(weights=seen[n].weights[:1]) for n in (0, 2)]  # first sentence
        drawn = panels(drawings.draw_attention(chosen, [1, 3], words, words, "title"))
        for axes, (layer, head) in zip(drawn, [(0, 1), (0, 3), (2, 1), (2, 3)]):
            shown = image(axes)
            hidden = padded.expand(9, 9)
            if layer == 0:
                hidden = hidden | torch.ones(9, 9).triu(1).bool()
            assert_same(np.ma.getmaskarray(shown), hidden)
            assert_same(shown.filled(0), seen[layer].weights[0, head].masked_fill(hidden, 0))
        assert [text.get_text() for text in drawn[2].get_yticklabels()] == words

    def test_crosswise_keys_are_the_sources(self):
        cross = [each for each in seen_by("translation", make_tokens()) if each.cross]
        words, keys = list("abcdefghi"), list("ABCDEFGHI")
        (axes,) = panels(drawings.draw_attention(cross[:1], [0], words, keys, "title"))
        assert [text.get_text() for text in axes.get_xticklabels()] == list("ABCDEFGHI")
        assert_same(image(axes), cross[0].weights[0, 0])


SPEC_PLOTS = [
    *("table --encoding learned", "map --encoding learned", "products --encoding sinusoidal"),
    *("decay --encoding rope", "scores --encoding alibi", "table --encoding fire"),
]
DRAWN = product_of(some_of(SPEC_PLOTS[::2], SPEC_PLOTS), ["png", "svg"])


class TestCommand:
    @pytest.mark.parametrize(("words", "ending"), DRAWN)
    def test_a_spec_is_drawn_the_same_again(self, words, ending, tmp_path):
        words += " --embed-dim 32 --decoder"
        out = tmp_path / f"picture.{ending}"
        written = []
        for _ in range(2):
            assert main(["plot", *words.split(), "--out", str(out)]) == 0
            written.append(out.read_bytes())
        assert written[0] == written[1]
        assert b"Matplotlib v" not in written[0]
        width = int.from_bytes(written[0][16:20], "big")  # of a PNG, in pixels
        assert width == 800 if ending == "png" else b"<svg" in written[0]

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            ("table", "one of the arguments --checkpoint --encoding is required"),
            ("table --encoding m4 --checkpoint x.pt", "not allowed with argument --encoding"),
            ("table --encoding rope", "rope has no table"),
            ("table --encoding roep", "unknown position encoding"),
            ("table --encoding fire", "fire is for causal models"),
            ("table --encoding m4 --layer 2", "--layer 2: m4 has layers 1 to 1"),
            ("table --encoding m4 --layer 0", "--layer 0: m4 has layers 1 to 1"),
            ("table --encoding m4 --stack decoder", "--stack decoder: --encoding has encoder only"),
            ("table --checkpoint missing.pt", "missing.pt: no such file"),
            ("table --encoding m4 --heads 3", "3"),
            ("table --checkpoint x --heads 4", "--heads and --decoder are for --encoding"),
            ("table --encoding m4 --data bin", "--data is for --checkpoint, not for --encoding"),
            ("scores --encoding alibi --head 5", "--head 5: alibi has heads 1 to 4"),
            ("map --encoding raffel", "a map needs 3 rows and columns; raffel has fewer"),
            ("products --encoding alibi", "alibi adds no vectors at the input"),
            ("decay --encoding rope,t5 --layer 2", "rope,t5 has no bound on its decay"),
            ("attention --text a", "the following arguments are required: --checkpoint"),
            ("table --encoding m4 --out a.pdf", "--out a.pdf: name a file that ends in .png"),
            ("table --encoding m4 --out no/a.png", "--out no/a.png: name a file in an"),
        ],
    )
    def test_bad_input_is_one_line(self, words, says, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        out = [] if "--out" in words else ["--out", "a.png"]
        assert says in commands.refused(capsys, "plot", *words.split(), *out)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(("package", "kind"), [("matplotlib", "table"), ("sklearn", "map")])
    def test_what_is_not_installed_is_named(self, package, kind, tmp_path, monkeypatch, capsys):
        for module in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setitem(sys.modules, package, None)
        assert main(["plot", kind, "--encoding", "learned", "--out", str(tmp_path / "a.png")]) == 2
        assert "pip install '.[plot]' in a checkout" in capsys.readouterr().err


def test_the_page_names_every_kind():
    page = (Path(__file__).parents[3] / "docs" / "plots.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(KINDS)


WORDS = "w1 w2 w3 w4 w5"
TRAINED_PLOTS = {
    "masked_lm": ["table", "map --layer 1", "scores", f"attention --text '{WORDS}'"],
    "causal_lm": ["products --layer 1 2", "decay", "scores", f"attention --text '{WORDS}'"],
    "translation": [
        f"attention --text '{WORDS}' --stack cross",
        f"attention --text '{WORDS}' --target 'w5 w4' --stack decoder --head 1",
        "scores --stack decoder",
    ],
}


@pytest.mark.slow
class TestCheckpoints:
    @pytest.mark.parametrize("family", TRAINED_PLOTS)
    def test_every_kind_is_drawn(self, family, tmp_path):
        checkpoint = commands.trained(family).save_dir / "checkpoint_last.pt"
        for number, words in enumerate(TRAINED_PLOTS[family]):
            out = tmp_path / f"{number}.png"
            source = ["--checkpoint", str(checkpoint), "--out", str(out)]
            assert main(["plot", *shlex.split(words), *source]) == 0
            assert out.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("family", "words", "says"),
        [
            ("masked_lm", "attention --text w1 --layer 9", "--layer 9: "),
            ("masked_lm", "attention --text w1 --head 9", "--head 9: "),
            ("masked_lm", "attention --text w1 --stack cross", "has encoder only"),
            ("masked_lm", "attention --text w1 --target w2", "--target is for translation"),
            ("masked_lm", f"attention --text '{'w1 ' * 1100}'", "8 heads reads 1024 tokens, and"),
            ("causal_lm", f"attention --text '{'w1 ' * 40}'", "sequence of 41 tokens is longer"),
        ],
    )
    def test_bad_input_is_one_line(self, family, words, says, tmp_path, capsys):
        checkpoint = commands.trained(family).save_dir / "checkpoint_last.pt"
        source = ["--checkpoint", checkpoint, "--out", tmp_path / "a.png"]
        assert says in commands.refused(capsys, "plot", *shlex.split(words), *source)
        assert not (tmp_path / "a.png").exists()
