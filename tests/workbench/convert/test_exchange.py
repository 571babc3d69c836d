"""Models carried to transformers compute there what they compute in fairseq."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from fairseq.data.data_utils import collate_tokens
from fairseq.dataclass.configs import GenerationConfig

from fairseq_posenc import registry
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.convert.exchange.hf_folder_writer import format_model_usage
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import checkpoint
from tests.helpers.products import product_of, some_of
from tests.helpers.tiny_models import needs_causal
from tests.workbench.convert.exchange_reader import answer, load

AUTO = {
    "masked_lm": "AutoModelForMaskedLM",
    "causal_lm": "AutoModelForCausalLM",
    "translation": "AutoModelForSeq2SeqLM",
}
# Pythons with transformers and neither fairseq nor this package, joined by ":".
OTHERS = [each for each in os.environ.get("POSENC_TRANSFORMERS", "").split(":") if each]
HARD = [
    ("masked_lm", "rope(scaling=yarn:4)+m4(reset=true)", {"attention_directions": "lr,rl"}),
    ("masked_lm", "sentence_learned+tupe(tie_projections=true)", {}),
    ("masked_lm", "m4m+alibi", {"untie_weights_roberta": True, "encoder_normalize_before": True}),
    ("causal_lm", "xpos+alibi", {"no_decoder_final_norm": True}),
    ("causal_lm", "sentence_learned+fire", {"no_share_decoder_input_output_embed": True}),
    ("causal_lm", "rope(layout=half)+alibi", {}),
    ("translation", "m4+rope(cross_attention=true)", {"encoder_embed_dim": 48}),
    ("translation", "sinusoidal(layout=fairseq)", {"share_all_embeddings": True}),
    ("causal_lm", "rope+window(size=4),none+ssmax", {}),
    ("masked_lm", "t5+window(size=5)+sink,m4m", {}),
    ("causal_lm", "alibi+fox+chunk(size=6)", {}),
    ("causal_lm", "m4m+window(size=4,first=2),none", {}),
]
# A GPT-NeoX of transformers computes these.
ROTATIONS = [
    *("rope", "rope(layout=half)", "rope(base=500,fraction=0.5)", "rope(scaling=linear:4)"),
    *("rope(layout=half,scaling=ntk:4)", "rope(scaling=ntk:4,fraction=0.5)"),
    *("rope(layout=half,scaling=dynamic:2:length=12)", "rope(scaling=dynamic:2)"),
    "rope(layout=half,scaling=yarn:4:beta_fast=8:mscale=0.7:mscale_all_dim=1:truncate=false)",
    "rope(scaling=yarn:4:attention_factor=1.3:length=12,base=500)",
    "rope(layout=half,scaling=llama3:8:high=3:length=12)",
    "rope(layout=half,scaling=longrope:2:short=1/1.1/1.2/1.3:long=1/1.5/2/4:length=12)",
    "rope(scaling=longrope:2:short=1/1.5:long=1/2:length=24,fraction=0.5)",
    *("rope(layout=half,scaling=proportional:2:part=0.5)", "rope(scaling=proportional:1:part=0.8)"),
    "rope(scaling=proportional:1:part=0.5,fraction=0.5)",
]
OF_TODAY = [
    ("causal_lm", "rope+sink(value=0.5)+logn(length=4)"),
    ("causal_lm", "learned+rope+randomized(limit=60)"),
    ("causal_lm", "m4m+llama4(length=4)"),
    ("causal_lm", "rope(scaling=dynamic:2)+documents"),
    ("masked_lm", "pope+ministral3(length=4)"),
    ("masked_lm", "fox+window(size=5)"),
]


def export(trained, *more, tokens="words"):
    """Return the folder of an export."""
    out = new_directory() / "out"
    words = ["--checkpoint", trained.path, "--to", "hf", "--out", out, "--tokens", tokens, *more]
    assert main(["export", *map(str, words)]) == 0
    return out


@cache
def _exported_once(family, spec, more):
    return export(checkpoint(family, spec, **dict(more)))


def exported_copy(family, spec, **more):
    """Return a copy of the export of a tiny model, which is made once for each session."""
    made = _exported_once(family, spec, tuple(more.items()))
    return Path(shutil.copytree(made, new_directory() / "out"))


def padded(side, rows=4, longest=20, symbols=40):
    """Return sentences of several lengths, and where they are real."""
    sentences = [
        torch.cat([torch.randint(4, 4 + symbols, (length,)), torch.tensor([2])])
        for length in torch.linspace(1, longest - 1, rows).long().tolist()
    ]
    tokens = collate_tokens(sentences, 1, left_pad=side == "left")
    return tokens, tokens.ne(1)


def scores(trained, family, tokens):
    with torch.no_grad():
        if family == "translation":
            return trained.model(tokens, tokens.ne(1).sum(1), tokens)[0]
        return trained.model(tokens)[0]


def asked(family, tokens, real):
    inputs = {"input_ids": tokens, "attention_mask": real.long()}
    if family == "translation":
        inputs["decoder_input_ids"] = tokens
    return {"auto": AUTO[family], "inputs": inputs}


def of_every_encoding():
    for name in registry.names():
        yield ("causal_lm" if needs_causal(name) else "masked_lm"), name, {}
    yield from HARD
    yield from (("causal_lm", spec, {}) for spec in some_of(ROTATIONS[::2], ROTATIONS))
    yield from ((family, spec, {}) for family, spec in OF_TODAY)


@pytest.mark.parametrize(("family", "spec", "more"), of_every_encoding())
def test_scores_are_those_of_fairseq(family, spec, more):
    trained = checkpoint(family, spec, **more)
    model, _ = load(str(export(trained)), AUTO[family])
    for side in ("left", "right"):
        tokens, real = padded(side)
        with torch.no_grad():
            theirs = model(**asked(family, tokens, real)["inputs"]).logits
        ours = scores(trained, family, tokens)
        torch.testing.assert_close(theirs[real], ours[real], atol=1e-5, rtol=1e-5)


def test_the_comparison_would_notice(monkeypatch, capsys):
    """A model that is built otherwise than the checkpoint's is not written."""
    from fairseq_posenc.workbench.convert.exchange import config_json, exporting

    def wrong(trained):
        config = config_json.build_config(trained)
        config["encoder_stack"]["directions"] = ["lr"] * 3
        return config

    monkeypatch.setattr(exporting, "build_config", wrong)
    out = new_directory() / "out"
    trained = checkpoint("masked_lm", "m4m")
    words = ["--checkpoint", trained.path, "--to", "hf", "--out", out, "--tokens", "none"]
    assert main(["export", *map(str, words)]) == 2
    assert "differs from the model by" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("spec", "beams"),
    product_of(
        [
            *("learned+rope", "sentence_learned+m4(reset=true)", "fire", "rope(layout=half)"),
            *("fox", "fox+sink,rope+window(size=4)", "cope", "rope+ssmax"),
            *("fox+window(size=5)", "t5+chunk(size=6),alibi+window(size=3)"),
            *("cope+window(size=4)", "rope+logn(length=4)+window(size=1)"),
            "fox+window(size=3,first=2),rope+window(size=4)",
        ],
        [1, 4],
    ),
)
def test_causal_generation_with_caches_is_that_without(spec, beams):
    folder = exported_copy("causal_lm", spec)
    tokens, real = padded("left", longest=10)
    search = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False}
    search |= {"input_ids": tokens, "attention_mask": real.long()}
    searches = [{**search, "use_cache": kept} for kept in (True, False)]
    found = answer(str(folder), {"auto": AUTO["causal_lm"], "generate": searches})["generated"]
    assert torch.equal(*found)


def test_caches_keep_what_windows_let_later_tokens_see():
    folder = export(checkpoint("causal_lm", "rope+window(size=4),none"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokens, real = padded("left", longest=14)
    search = {"input_ids": tokens, "attention_mask": real.long()}
    search |= {"min_new_tokens": 5, "max_new_tokens": 5}
    cache = model.generate(**search, return_dict_in_generate=True).past_key_values
    assert [layer.keys.size(2) for layer in cache.layers] == [3, tokens.size(1) + 4, 3]
    cache = model(tokens, attention_mask=real.long(), use_cache=True).past_key_values
    assert [layer.keys.size(2) for layer in cache.layers] == [3, tokens.size(1), 3]


@pytest.mark.parametrize("spec", ["rope+alibi", *some_of(ROTATIONS[1::2], ROTATIONS)])
def test_causal_generation_is_that_of_fairseq(spec):
    trained = checkpoint("causal_lm", spec)
    folder = export(trained)
    assert (folder / "modeling_fairseq_posenc.py").exists() == (spec not in ROTATIONS)
    tokens, search = beginnings()
    found = answer(str(folder), {"auto": AUTO["causal_lm"], "generate": [search]})["generated"][0]
    assert torch.equal(found, written(trained, tokens))


def beginnings():
    """Return 50 beginnings, and how transformers is to go on from them."""
    tokens = torch.cat([torch.full((50, 1), 2), torch.randint(4, 44, (50, 4))], 1)
    search = {"input_ids": tokens, "max_new_tokens": 12, "do_sample": False}
    return tokens, {**search, "suppress_tokens": [1, 2]}


def written(trained, tokens):
    """Write with a causal model here, greedily, after 50 beginnings."""
    for _ in range(12):
        last = scores(trained, "causal_lm", tokens)[:, -1]
        last[:, [1, 2]] = -torch.inf
        tokens = torch.cat([tokens, last.argmax(-1, keepdim=True)], 1)
    return tokens


@pytest.mark.parametrize("beams", [1, 5])
@pytest.mark.parametrize("spec", ["m4+rope(cross_attention=true)", "learned+t5"])
def test_translations_are_those_of_fairseq(spec, beams):
    trained = checkpoint("translation", spec, max_target_positions=60)
    folder = export(trained)
    tokens, real = padded("left", rows=50)
    wanted = searched(tokens, real, beams)
    found = answer(str(folder), {"auto": AUTO["translation"], "generate": [wanted]})["generated"][0]
    ended, equal = agreeing(translated(trained, tokens, real, beams), found)
    assert ended >= 40
    assert equal == ended


def searched(tokens, real, beams):
    """Build the settings with which transformers translates."""
    wanted = {"input_ids": tokens, "attention_mask": real.long(), "num_beams": beams}
    return {**wanted, "min_new_tokens": 6, "early_stopping": beams > 1}


def translated(trained, tokens, real, beams):
    """Return fairseq's translations."""
    search = trained.task.build_generator([trained.model], GenerationConfig(beam=beams, min_len=6))
    batch = {"net_input": {"src_tokens": tokens, "src_lengths": real.sum(1)}}
    return [each[0]["tokens"].tolist() for each in search.generate([trained.model], batch)]


def agreeing(ours, found):
    """Count the translations that ended before their limit of 60, and those of them that agree.

    At their limit the two do different things: fairseq forces an end, transformers stops.
    """
    theirs = [[token for token in row[1:] if token != 1] for row in found.tolist()]
    ended = [n for n in range(len(ours)) if max(len(ours[n]), len(theirs[n])) < 60]
    return len(ended), sum(theirs[n] == ours[n] for n in ended)


def test_the_code_needs_nothing_of_the_package_and_is_the_same_again():
    trained = checkpoint("masked_lm", "learned+m4m")
    first, second = ((export(trained) / "modeling_fairseq_posenc.py") for _ in range(2))
    text = first.read_text()
    assert text == second.read_text()
    modules = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert modules <= {"torch", "transformers", *sys.stdlib_module_names}
    assert "class M4M" in text
    assert "class Rope" not in text
    assert "fairseq_posenc." not in text


@pytest.mark.skipif(not OTHERS, reason="POSENC_TRANSFORMERS names no other Python")
@pytest.mark.parametrize("python", OTHERS)
@pytest.mark.parametrize(("family", "spec", "more"), HARD)
def test_another_environment_reads_it(python, family, spec, more):
    trained = checkpoint(family, spec, **more)
    folder = export(trained)
    tokens, real = padded("left", longest=14)
    want = {**asked(family, tokens, real), "texts": ["w1 w2 w3"]}
    if family != "masked_lm":
        want["generate"] = [{**want["inputs"], "max_new_tokens": 9, "num_beams": n} for n in (1, 4)]
        for each in want["generate"]:
            each.pop("decoder_input_ids", None)
    here = answer(str(folder), want)
    (there,) = outside(python, (folder, want))
    ours = scores(trained, family, tokens)
    torch.testing.assert_close(there["scores"][real], ours[real], atol=1e-5, rtol=1e-5)
    assert there["ids"] == here["ids"]
    for one, other in zip(here.get("generated", []), there.get("generated", [])):
        assert torch.equal(one, other)


def outside(python, *jobs, script="exchange_reader.py"):
    """Ask another Python about folders."""
    place = new_directory()
    torch.save([(str(folder), want) for folder, want in jobs], place / "asked.pt")
    command = [python, Path(__file__).with_name(script), place / "asked.pt", place / "answers.pt"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*map(str, command)], check=True, env=clean, cwd=place)
    return torch.load(place / "answers.pt", weights_only=False)


def exported(family, name):
    """Return a model, its folder, what is asked of it, and fairseq's answers."""
    more = {"max_target_positions": 60} if family == "translation" else {}
    trained = checkpoint(family, name, **more)
    tokens, real = padded("left")
    want = asked(family, tokens, real)
    ours = {"scores": scores(trained, family, tokens)[real], "real": real}
    if family == "causal_lm":
        begun, search = beginnings()
        want["generate"], ours["written"] = [search], written(trained, begun)
    if family == "translation":
        sources = padded("left", rows=50)
        want["generate"] = [searched(*sources, beams) for beams in (1, 5)]
        ours["translated"] = [translated(trained, *sources, beams) for beams in (1, 5)]
    return export(trained), want, ours


def cell(ours, answers):
    """Collect, for each environment, the difference of a model and what it writes."""
    own = answers[0]["class"].startswith("Posenc")
    said = ["own code" if own else answers[0]["class"]]
    for found in answers:
        gap = (found["scores"][ours["real"]] - ours["scores"]).abs().max().item()
        said.append(f"{gap:.0e}" if gap else "0")
        if "written" in ours:
            equal = (found["generated"][0] == ours["written"]).all(1).sum().item()
            said[-1] += f" {equal}/50"
        for theirs, mine in zip(found.get("generated", []), ours.get("translated", [])):
            ended, equal = agreeing(mine, theirs)
            said[-1] += f" {equal}/{ended}"
    return ", ".join(said)


def table():
    """Print what each encoding becomes in each family, and how equal it is in each environment."""
    names = sys.argv[1:] or registry.names()
    pairs = [(n, family) for n in names for family in AUTO if n in registry_of(family)]
    found = {pair: exported(*pair[::-1]) for pair in pairs}
    jobs = [each[:2] for each in found.values()]
    answers = zip(*(outside(python, *jobs) for python in OTHERS))
    cells = {pair: cell(found[pair][2], each) for pair, each in zip(found, answers)}
    print("| encoding | masked LM | causal LM | translation |\n| --- | --- | --- | --- |")
    for name in names:
        row = [cells.get((name, family), "no such model") for family in AUTO]
        print(f"| `{name}` | {' | '.join(row)} |")


def registry_of(family):
    """Return the encodings that a family has."""
    return registry.names(encoder=family != "causal_lm")


if __name__ == "__main__":
    table()


@pytest.mark.parametrize("model", ["BertForMaskedLM", "RoFormerForMaskedLM", "PosencForMaskedLM"])
def test_a_card_names_the_auto_class(model):
    usage = format_model_usage({"architectures": [model]})
    assert "AutoModelForMaskedLM.from_pretrained" in usage
