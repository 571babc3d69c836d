"""The attention report: what is read, what is written, and what is refused."""

from __future__ import annotations

import base64
import json
import re
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_posenc.analysis.split import CapturedAttention
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.subwords import learn_pieces
from fairseq_posenc.transformer.capture_attention import capture_attention
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.loading.open_model import open_model
from fairseq_posenc.workbench.plots.inspection import (
    LARGEST_STEP,
    MIN_STEPS,
    TextAttention,
    find_telling_head,
    find_visible,
    quantize,
    refuse_long_text,
    render_page,
)
from fairseq_posenc.workbench.plots.read_checkpoint import read_with_checkpoint, tokenize
from fairseq_posenc.workbench.plots.subject import collect_subjects
from tests.helpers.commands import USER_DIR, new_directory, refused, run, train, trained
from tests.helpers.documented import own_encodings
from tests.helpers.tiny_models import logits, make_dictionary, make_model

slow = pytest.mark.slow
TEXT = "w3 w7 w1 w7 w12"
STOCK = {
    "masked_lm": ["--arch", "roberta_base", "--max-positions", 16, "--encoder-layers", 2],
    "causal_lm": ["--arch", "transformer_lm", "--decoder-layers", 2],
    "translation": ["--arch", "transformer_tiny", "--max-source-positions", 16],
}
NARROW = {
    "masked_lm": ["--encoder-embed-dim", 16, "--encoder-attention-heads", 2],
    "causal_lm": ["--decoder-embed-dim", 16, "--decoder-attention-heads", 2],
    "translation": [],
}


def read_by(family: str, model, labels: list[str]) -> TextAttention:
    """Return a model's attention to random tokens with labels, as if of a checkpoint."""
    tokens = torch.randint(4, 20, (1, len(labels)))
    captured = capture_attention(model, lambda: logits(model, family, tokens))
    stacks = collect_subjects(model)
    positions: dict[str, str | None] = {name: stack.title for name, stack in stacks.items()}
    by_stack = {"encoder": labels, "decoder": labels}
    return TextAttention(Path("model.pt"), "0" * 64, family, positions, by_stack, captured)


def content_of(html: str) -> tuple[dict, np.ndarray]:
    """Read a page: its facts, and the codes of its planes."""
    data, codes = (
        re.findall(f'<script type="[a-z/]+" id="{name}">(.*?)</script>', html, re.DOTALL)[0]
        for name in ("data", "codes")
    )
    return json.loads(data), np.frombuffer(zlib.decompress(base64.b64decode(codes)), np.uint8)


def numbers_of(html: str, kind: str, name: str, model: int = 0) -> np.ndarray | None:
    """Return a plane of a page as numbers ``[L, H, T, S]``, NaN where nothing is seen."""
    data, codes = content_of(html)
    facts = data["models"][model]
    (found,) = (each for each in facts["kinds"] if each["name"] == kind)
    plane = next((each for each in found["planes"] if each["name"] == name), None)
    if plane is None:
        return None
    shape = found["layers"], found["heads"], len(found["queries"]), len(found["keys"])
    size = np.prod(shape)
    start = facts["start"] + plane["start"]
    low, high = (codes[place : place + size].reshape(shape) for place in (start, start + size))
    values = low + 256.0 * high
    first, step = (np.array(plane[each])[..., None, None] for each in ("first", "step"))
    return np.where(values > 0, (first + values - 1) * step, np.nan)


@pytest.mark.parametrize("size", [1e-3, 1.0, 10.0, 1e5])
def test_a_number_is_within_half_a_step(size):
    values = torch.randn(2, 3, 7, 5, dtype=torch.float64) * size
    seen = torch.ones(2, 1, 7, 5, dtype=torch.bool)
    seen[1] = seen[1].tril()
    found = quantize(values, seen)
    step, first = torch.tensor([found.step, found.first], dtype=torch.float64)[..., None, None]
    back = (first + found.codes - 1) * step
    assert ((back - values).abs() <= step * 0.5001)[seen.expand_as(values)].all()
    assert (found.codes.eq(0) == ~seen).all()
    assert found.codes.max() < 2**16
    message = torch.where(seen, values, values[..., :1, :1])
    spread = message.amax((2, 3)) - message.amin((2, 3))
    bound = torch.clamp(spread / MIN_STEPS, max=LARGEST_STEP).maximum(spread / 65_000)
    torch.testing.assert_close(step[..., 0, 0], bound)


@pytest.mark.parametrize("number", [0.25, 0.0, -3.0])
def test_equal_numbers_are_shown_in_hundredths(number):
    found = quantize(torch.full((1, 1, 2, 2), number), torch.ones(1, 1, 2, 2, dtype=torch.bool))
    assert found.codes.eq(1).all()
    assert found.first[0][0] * found.step[0][0] == pytest.approx(number)
    assert found.first == found.last


def test_the_first_head_shown_is_the_one_whose_rows_differ_most():
    """Rows that are alike, uniform or at the first token alone, show nothing."""
    sink, uniform, near = torch.zeros(3, 6, 6).unbind()
    sink[:, 0] = 1
    uniform[:] = torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None]
    near[range(6), [0, 0, 1, 2, 3, 4]] = 1
    weights = torch.stack([torch.stack([sink, uniform]), torch.stack([uniform, near])])
    assert find_telling_head(weights) == [1, 1]


def test_what_a_layer_sees_is_shown_by_its_directions():
    model = make_model("masked_lm", attention_directions="lr,rl")
    tokens = torch.randint(4, 20, (1, 6))
    layers = capture_attention(model, lambda: logits(model, "masked_lm", tokens))
    whole = torch.ones(6, 6, dtype=torch.bool)
    expected = torch.stack([whole.tril(), whole.triu(), whole])[:, None]
    assert find_visible(torch.cat([layer.weights for layer in layers])).equal(expected)


@cache
def inspected(family: str) -> str:
    """Return the page of the model of a family that all tests share."""
    checkpoint = trained(family).save_dir / "checkpoint_last.pt"
    out = new_directory() / "attention.html"
    run("fairseq-posenc", "inspect", "--checkpoint", checkpoint, "--text", TEXT, "--out", out)
    return out.read_text(encoding="utf-8")


def attention(family: str) -> list[CapturedAttention]:
    opened = open_model(trained(family).save_dir / "checkpoint_last.pt")
    return read_with_checkpoint(opened, TEXT).captured


PARTS = ["content", "position", "both"]
KINDS = {"masked_lm": ["encoder"], "causal_lm": ["decoder"]}
KINDS["translation"] = ["encoder", "decoder", "cross"]


@slow
@pytest.mark.parametrize("family", KINDS)
def test_the_page_has_the_models_numbers(family):
    html = inspected(family)
    assert [kind["name"] for kind in content_of(html)[0]["models"][0]["kinds"]] == KINDS[family]
    for layer in attention(family):
        kind = "cross" if layer.cross else layer.stack
        weights = numbers_of(html, kind, "weight")[layer.layer]
        hidden = np.isnan(weights)
        ours, theirs = np.nan_to_num(weights), layer.weights[0].numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-2)
        assert (hidden.all(0) == (np.triu(np.ones_like(hidden[0]), 1) * (kind == "decoder"))).all()
        for part in PARTS:
            shown = numbers_of(html, kind, part)
            exact = getattr(layer.split, part)[0].numpy()
            np.testing.assert_allclose(shown[layer.layer][~hidden], exact[~hidden], atol=1e-2)


@slow
def test_the_factors_of_a_product_stand_beside():
    names = ("content factor", "query table factor", "key table factor")
    shown = [numbers_of(inspected("masked_lm"), "encoder", name) for name in names]
    for layer in attention("masked_lm"):
        for ours, theirs in zip(shown, layer.split.details.values()):
            np.testing.assert_allclose(ours[layer.layer], theirs[0].numpy(), atol=1e-2)


@pytest.mark.parametrize("spec", ["shaw+rope,none", "none,shaw+rope", "m4m,none"])
def test_layers_with_other_parts_than_the_first_are_shown(spec):
    model = make_model("masked_lm", position_encoding=spec)
    html = render_page([read_by("masked_lm", model, ["a"] * 6)], "")
    for name in ("query table", "rotation"):
        layers = numbers_of(html, "encoder", name)
        shown = None if layers is None else {np.nan_to_num(x).any() for x in layers}
        assert shown == (None if spec == "m4m,none" else {True, False})  # a product and a sum


@slow
def test_the_page_says_what_it_was_made_from():
    checkpoint = trained("causal_lm").save_dir / "checkpoint_last.pt"
    data, _ = content_of(inspected("causal_lm"))
    (model,) = data["models"]
    assert data["command"].startswith(f"fairseq-posenc inspect --checkpoint {checkpoint} --text ")
    assert model["sha256"] == checksum(checkpoint)
    assert model["positions"] == {"decoder": "learned+rope"}
    assert model["family"] == "causal LM"


@slow
def test_checkpoints_with_an_encoding_of_the_users_own_package_are_read(tmp_path, capsys):
    package = own_encodings()
    own = ["--position-encoding", "root", "--max-update", 1]
    checkpoint = train("masked_lm", *own, user_dir=package).save_dir / "checkpoint_last.pt"
    given = ["--checkpoint", checkpoint, "--user-dir", package]
    exported = tmp_path / "model"
    done = run("fairseq-posenc", "export", *given, "--tokens", "words", "--out", exported)
    assert "load it after `import fairseq_posenc.hf, my_encodings`" in done.out
    (lines,) = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(), re.S)
    run("python", "-c", lines, cwd=exported, PYTHONPATH=str(package.parent))
    folder = ["--checkpoint", exported, "--user-dir", package]
    run("fairseq-posenc", "inspect", *folder, "--text", TEXT, "--out", tmp_path / "page.html")
    (model,) = content_of((tmp_path / "page.html").read_text())[0]["models"]
    assert model["positions"] == {"encoder": "root"}
    failed = refused(capsys, "inspect", *given[:3], tmp_path, "--text", "a")
    assert "name a folder of a Python package, with __init__.py" in failed
    failed = refused(capsys, "inspect", *given[:2], "--text", "a")
    assert "unknown position encoding 'root'" in failed
    assert "option user-dir" in failed


@slow
def test_two_checkpoints_share_a_page(capsys):
    out = new_directory() / "two.html"
    paths = [str(trained(family).save_dir / "checkpoint_last.pt") for family in KINDS][:2]
    given = [part for path in paths for part in ("--checkpoint", path)]
    assert main(["inspect", *given, "--text", TEXT, "--out", str(out)]) == 0
    html = out.read_text(encoding="utf-8")
    assert f"wrote {out}, {len(html) / 1e6:.2f} MB" in capsys.readouterr().err
    for number, (family, kind) in enumerate((("masked_lm", "encoder"), ("causal_lm", "decoder"))):
        alone = numbers_of(inspected(family), kind, "weight")
        np.testing.assert_array_equal(numbers_of(html, kind, "weight", number), alone)


@slow
@pytest.mark.parametrize("family", STOCK)
def test_models_of_fairseqs_own_show_weights_and_scores(family):
    options = *STOCK[family], *NARROW[family], "--max-update", 1
    save_dir = train(family, *options, user_dir=None).save_dir
    opened = open_model(save_dir / "checkpoint_last.pt")
    assert set(opened.positions.values()) == {None}
    read = read_with_checkpoint(opened, TEXT)
    for kind in content_of(render_page([read], ""))[0]["models"][0]["kinds"]:
        assert [plane["name"] for plane in kind["planes"]] == ["weight", *PARTS]
    with pytest.raises(UserError, match=r"reads 1[0-9]* tokens, and the text has"):
        read_with_checkpoint(opened, " ".join(["w1"] * 1100))
    refuse_long_text("a large model", 512, 8192, heads=24 * 16)
    with pytest.raises(UserError, match="of 270 heads reads 705 tokens, and the text has 706"):
        refuse_long_text("SmolLM2", 706, 8192, heads=270)
    with pytest.raises(UserError, match="a page takes 67,108,864 weights, not"):
        render_page([read] * 2**20, "")
    state = torch.load(save_dir / "checkpoint_last.pt")
    broken = next(value for name, value in state["model"].items() if name.endswith("k_proj.weight"))
    broken[0, 0] = torch.nan
    torch.save(state, save_dir / "broken.pt")
    with pytest.raises(UserError, match=r"broken.pt: the checkpoint is damaged.*1 of .* NaN"):
        open_model(save_dir / "broken.pt")


@pytest.mark.parametrize(("spec", "limit"), [("m4m", 5e6), ("rope+m4", 5e6), ("t5", 2e6)])
def test_a_page_of_six_layers_eight_heads_and_64_tokens_is_small(spec, limit):
    """The longest pages: three kinds of attention, with all that scores are made of."""
    sizes = {"layers": 6, "embed_dim": 128, "attention_heads": 8}
    options = {f"{s}_{name}": n for s in ("encoder", "decoder") for name, n in sizes.items()}
    options |= {"max_source_positions": 64, "max_target_positions": 64}
    model = make_model("translation", position_encoding=spec, **options)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # bytes that hardly repeat
    assert len(render_page([read_by("translation", model, ["a word"] * 64)], "")) < limit


def test_no_text_ends_the_script_that_holds_it():
    labels = ["</script>", "<!--", "<script>", "{{codes}}", "{{data}}"]
    html = render_page([read_by("masked_lm", make_model("masked_lm"), labels)], "")
    assert content_of(html)[0]["models"][0]["kinds"][0]["queries"] == labels


def test_a_text_is_cut_by_the_pieces_of_its_language(tmp_path):
    (tmp_path / "text").write_text("the old house by the old bridge\n" * 20)
    prefix = str(tmp_path / "sentencepiece.en")
    whole = ["▁the", "▁old"]
    learn_pieces(19, input=str(tmp_path / "text"), model_prefix=prefix, user_defined_symbols=whole)
    found = tokenize("the old  house", "--text", tmp_path, make_dictionary(whole), "en")
    labels = [label for _, label in found]
    assert labels[:2] == ["the", "old"]
    assert all(label.endswith(" (unknown)") for label in labels[3:])
    assert "".join(label.removesuffix(" (unknown)") for label in labels[2:]).endswith("house")
    with pytest.raises(UserError, match=r"--text 'the old': no token of it is in the dictionary"):
        tokenize("the old", "--text", tmp_path, make_dictionary(["w0", "w1"]), "en")


def test_without_a_tokenizer_symbols_stand_between_spaces(tmp_path):
    found = tokenize(" w1  w2 what ", "--text", tmp_path, make_dictionary())
    assert found == [(5, "w1"), (6, "w2"), (3, "what (unknown)")]


@slow
def test_the_models_own_translation_is_read_where_none_is_given():
    opened = open_model(trained("translation").save_dir / "checkpoint_last.pt")
    own = read_with_checkpoint(opened, TEXT)
    assert own.labels["encoder"] == [*TEXT.split(), "</s>"]
    start, *tokens = own.labels["decoder"]
    assert start == "</s>"
    assert tokens
    words = [opened.data, "--user-dir", USER_DIR, "--path", opened.path, "--beam", 5]
    generated = run("fairseq-interactive", *words, given=TEXT + "\n")
    (line,) = (line for line in generated.out.splitlines() if line.startswith("H-0"))
    assert tokens == line.split("\t")[2].split()
    assert read_with_checkpoint(opened, TEXT, " ".join(tokens)).labels == own.labels


def refusal(capsys, checkpoint: Path, *more: object) -> str:
    """Return the one line of a command that fails."""
    out = new_directory() / "page.html"
    words = ["inspect", "--checkpoint", checkpoint, "--text", TEXT, "--out", out, *more]
    message = refused(capsys, *words)
    assert not out.exists()
    return message


@slow
def test_wrong_input_is_one_line(capsys, tmp_path):
    masked = trained("masked_lm").save_dir / "checkpoint_last.pt"
    translating = trained("translation").save_dir / "checkpoint_last.pt"
    for expected, *words in (
        ("no such file", tmp_path / "none.pt"),
        ("no such folder", masked, "--data", tmp_path / "none"),
        ("holds no dict.txt", masked, "--data", tmp_path),
        ("no files of a language pair", translating, "--data", tmp_path),
        ("--target is for translation", masked, "--target", "w1"),
        ("--text '': no token of it", masked, "--text", ""),
        ("--text 'a b': no token of it", masked, "--text", "a b"),
        ("--target 'a b': no token of it", translating, "--target", "a b"),
        ("a sequence of 31 tokens is longer", translating, "--target", "w1 " * 30),
        ("3 were named; name one or two", masked, "--checkpoint", masked, "--checkpoint", masked),
        ("name a file in an existing folder", masked, "--out", tmp_path / "no" / "x.html"),
        ("name a file in an existing folder", masked, "--out", tmp_path),
    ):
        assert expected in refusal(capsys, *words), expected


@slow
def test_checkpoints_of_another_kind_or_broken_are_refused(capsys, tmp_path):
    state = trained("masked_lm").checkpoint()
    path = tmp_path / "other.pt"
    (name,) = (key for key in state["model"] if key.endswith("layers.0.self_attn.k_proj.weight"))
    state["model"][name][0, 0] = torch.nan
    torch.save(state, path)
    assert "NaN" in refusal(capsys, path)
    for weight in (name, name.replace("k_proj", "q_proj")):  # larger ones are refused as damaged
        state["model"][weight] = 9e17 * torch.randn(state["model"][weight].shape).sign()
    torch.save(state, path)
    assert "attention that is NaN or infinite (encoder, layer 1" in refusal(capsys, path)
    state["cfg"]["model"]._name = "wav2vec2"
    torch.save(state, path)
    assert "a model of the kind wav2vec2" in refusal(capsys, path)
    path.write_bytes(path.read_bytes()[:1000])
    assert "not a complete checkpoint" in refusal(capsys, path)
