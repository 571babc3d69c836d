"""The data of the papers: whole, readable by the package, and without misprints that sums show."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from fairseq import options
from fairseq.models import MODEL_DATACLASS_REGISTRY

from fairseq_posenc import specs
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.training import recipes
from tests.helpers.tiny_models import make_model

DATA = recipes.load()
PRETRAINING, REPORTED = DATA["pretraining"], DATA["reported"]
NAMES = ["a_small", "a_base", "a_c4", "a_large", "a_none", "b_small", "b_large", "b_lm"]
TRAININGS = [*NAMES, recipes.TRANSLATION]


def rows(table: str) -> dict[tuple[str, str], dict[str, float]]:
    """Return a table's values by position encoding and directions."""
    return {
        (row["position_encoding"], row.get("attention_directions", "both")): row["values"]
        for row in REPORTED[table]["rows"]
    }


def test_every_experiment_is_there_with_a_script_and_a_configuration():
    scripts = Path(__file__).parents[3] / "train_scripts"
    assert set(PRETRAINING) == set(NAMES)
    assert {path.stem for path in scripts.glob("*.sh")} - {"ablation", "slurm"} == {
        *recipes.list_trainings()
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_tells_apart_what_the_paper_gives(name):
    recipe = recipes.build_recipe(name)
    assert not set(recipe.settings) & set(recipe.not_given)
    assert recipe.all_settings == {**recipe.settings, **recipe.not_given}
    assert recipe.source in DATA["sources"]
    assert {"task", "optimizer", "lr", "max_update"} <= set(recipe.settings)
    assert recipe.note
    for spec in PRETRAINING[name]["position_encodings"]:
        specs.parse(spec)


def test_what_the_papers_do_not_give():
    """M4M's gives neither schedule nor decay; DecBERT's gives both, but not the input's length."""
    for name in ("a_small", "a_base", "a_c4", "a_large", "a_none"):
        assert {"lr_scheduler", "warmup_updates", "weight_decay", "adam_betas"} <= set(
            recipes.build_recipe(name).not_given
        )
    for name in ("b_small", "b_large", "b_lm"):
        recipe = recipes.build_recipe(name)
        assert {"lr_scheduler", "weight_decay", "adam_betas", "dropout"} <= set(recipe.settings)
        assert "tokens_per_sample" in recipe.not_given


# What changes a training wherever it is not stated, as fairseq has a default for each.
DEFAULTED = {
    *("activation_fn", "dropout", "attention_dropout"),
    *("adam_betas", "adam_eps", "weight_decay", "clip_norm", "lr_scheduler"),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_recipe_leaves_no_setting_to_fairseqs_defaults(name):
    assert set(recipes.build_recipe(name).all_settings) >= DEFAULTED


@pytest.mark.parametrize("table", ["glue", "squad"])
def test_what_is_fine_tuned_leaves_no_setting_to_the_model(table):
    for name, entry in DATA["finetuning"][table].items():
        stated = {**entry["settings"], **entry["not_given"]}
        assert DEFAULTED - {"activation_fn"} <= set(stated), name  # which is the model's


def test_a_causal_lm_drops_no_attention():
    """The paper has one dropout; attention's is what its models have without a word, fairseq's."""
    recipe = recipes.build_recipe("b_lm")
    assert "attention_dropout" not in recipe.settings
    assert recipe.not_given["attention_dropout"] == 0.0
    assert MODEL_DATACLASS_REGISTRY[recipe.arch]().attention_dropout == 0.0


def test_the_translation_models_stated_defaults_are_fairseqs():
    """What was left to fairseq before is written out, and is no other number."""
    recipe = recipes.build_recipe(recipes.TRANSLATION)
    words = ["data", "--task", "translation", "--arch", recipe.arch, "--optimizer", "adam"]
    found = vars(options.parse_args_and_arch(options.get_training_parser(), input_args=words))
    names = ("activation_fn", "attention_dropout", "adam_eps", "weight_decay", "clip_norm")
    stated = recipe.not_given
    assert {name: stated[name] for name in names} == {name: found[name] for name in names}
    assert str(found["adam_betas"]) == stated["adam_betas"]


def test_the_recipes_in_a_table():
    """Batch, updates, rate and gradient clipping of each, as the papers print them."""
    found = {
        name: (recipe.batch, *(recipe.all_settings[k] for k in ("max_update", "lr", "clip_norm")))
        for name, recipe in ((name, recipes.build_recipe(name)) for name in NAMES)
    }
    assert found == {
        "a_small": (96, 500_000, [1e-4], 0.0),
        "a_base": (480, 500_000, [1e-4], 0.0),
        "a_c4": (480, 500_000, [1e-4], 0.0),
        "a_large": (192, 500_000, [1e-4], 0.0),
        "a_none": (96, 500_000, [1e-4], 0.0),
        "b_small": (256, 200_000, [1e-4], 0.5),
        "b_large": (4096, 300_000, [3e-4], 2.0),
        "b_lm": (128, 100_000, [5e-5], 0.1),
    }
    large = recipes.build_recipe("b_large").all_settings
    assert large["warmup_steps"] + large["hold_steps"] + large["decay_steps"] == 500_000


# RoBERTa's dict.txt and the four symbols of every dictionary; a Chinese one of characters, whose
# size the paper does not give, with which the model has what it says.
SYMBOLS = {"WikiText-103": 50_260 + 4, "Chinese Wikipedia": 26_565}


@pytest.mark.parametrize(("encoding", "positions"), [("learned", 512 * 768), ("none", 0)])
def test_the_causal_lms_have_the_papers_number_of_parameters(encoding, positions):
    """95 and 77.5 million: input and output embeddings are one."""
    settings = {**recipes.build_recipe("b_lm").settings, "dropout": 0.0}
    names = [name for name in settings if name.startswith(("decoder_", "share_", "activation"))]
    options = {name: settings[name] for name in names}
    widths = {"decoder_input_dim": 0, "decoder_output_dim": 0}
    length = {"max_target_positions": 512, "tokens_per_sample": 512}
    model = make_model("causal_lm", f"transformer_lm_{encoding}", **options, **widths, **length)
    symbols = model.decoder.embed_tokens.num_embeddings
    matrices = [p for p in model.parameters() if len(p) == symbols]
    own = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in matrices)
    assert own == 56_704_512 + positions
    found = {name: own + len(matrices) * size * 768 for name, size in SYMBOLS.items()}
    stated = PRETRAINING["b_lm"]["parameters"]
    assert found["WikiText-103"] == {"learned": 95_700_480, "none": 95_307_264}[encoding]
    for name, count in found.items():
        assert count == pytest.approx(stated[name], rel=0.0075)
    if encoding == "learned":
        assert found["Chinese Wikipedia"] == pytest.approx(stated["Chinese Wikipedia"], abs=768)


@pytest.mark.parametrize("encoding", ["learned", "none"])
def test_the_architecture_alone_has_that_size_too(encoding):
    config = MODEL_DATACLASS_REGISTRY[f"transformer_lm_{encoding}"]()
    settings = recipes.build_recipe("b_lm").settings
    for name in settings:
        if name.startswith(("decoder_", "share_", "activation")):
            assert getattr(config, name) == settings[name]


def test_an_unknown_recipe_is_told_with_the_known_ones():
    with pytest.raises(UserError, match=r"'a_huge'; choose from a_small, a_base, a_c4,"):
        recipes.build_recipe("a_huge")


@pytest.mark.parametrize("name", REPORTED)
def test_a_table_has_a_value_or_none_for_every_column(name):
    table = REPORTED[name]
    assert table["source"] in DATA["sources"]
    assert table["rows"]
    for column in table["columns"].values():
        assert set(column) - {"unit", "digits"} == {"task", "metric", "split"}
    for row in table["rows"]:
        assert list(row["values"]) == list(table["columns"])
        assert all(v is None or math.isfinite(v) for v in row["values"].values())
        assert row.get("recipe", table["recipe"]) in (*PRETRAINING, recipes.TRANSLATION)
        specs.parse(row["position_encoding"])


@pytest.mark.parametrize(("name", "digits"), [("B3", 0.0051), ("B4", 0.051)])
def test_the_averages_are_those_of_the_columns(name, digits):
    for row in REPORTED[name]["rows"]:
        *scores, average = row["values"].values()
        assert sum(scores) / len(scores) == pytest.approx(average, abs=digits)


def test_m4_is_the_same_in_every_table():
    usual = rows("A2")["m4", "both"]
    assert rows("A3")["m4", "both"] == usual
    assert rows("A4")["m4", "both"] == usual


def test_figures_that_the_texts_repeat():
    assert rows("A2")["m4m", "both"]["SQuAD1.1 F1"] == 89.45
    assert rows("A7")["m4m", "both"]["SQuAD2.0 F1"] == 88.34
    perplexity = {key: values["perplexity"] for key, values in rows("B2").items()}
    ratio = perplexity["none", "both"] / perplexity["none", "lr,rl"]
    assert ratio == pytest.approx(77, abs=0.5)  # "77 times"
    averages = [row["values"]["average"] for row in REPORTED["B4"]["rows"]]
    assert averages[1] - averages[0] == pytest.approx(1.2)  # "1.2 points higher"
    assert math.log(perplexity["none", "both"]) == pytest.approx(5.8, abs=0.1)  # M4M's loss


def test_decberts_plateau_is_shorter_and_its_end_is_not_given():
    """ "The plateau stage of DecBERT is shortened (from around 7000 to 3000 steps)"."""
    bert, decbert = (row["values"] for row in REPORTED["B-figure2"]["rows"])
    assert bert["length of the plateau"] == bert["plateau"] - bert["start"] == 7000
    assert decbert["length of the plateau"] == 3000
    assert decbert["plateau"] is None


def test_what_needs_a_smaller_rate():
    squad, glue = (DATA["finetuning"][name]["m4m"] for name in ("squad", "glue"))
    assert squad["lr_of"] == dict.fromkeys(glue["diverge"], 2.5e-5)
    assert max(glue["smaller_lr"]) < min(glue["settings"]["lr"])
    assert "raffel and tupe diverge" in glue["note"]


def test_tupe_is_trained_with_the_reset_as_in_equation_15():
    every = [
        *DATA["pretraining"]["a_small"]["position_encodings"],
        *(row["position_encoding"] for table in REPORTED.values() for row in table["rows"]),
        *(run["position_encoding"] for each in DATA["ablations"].values() for run in each["runs"]),
    ]
    found = [specs.parse(spec) for spec in every if "tupe" in spec]
    assert found == [specs.parse("tupe+reset")] * 2


@pytest.mark.parametrize(("source", "protocol"), DATA["finetuning"]["glue"].items())
def test_a_glue_column_has_the_metric_that_chooses_the_checkpoint(source, protocol):
    found = {
        (column["task"].partition("-m")[0], column["metric"])
        for table in REPORTED.values()
        for column in table["columns"].values()
        if table["source"] == source
    }
    tasks = protocol["metrics"].keys() - {"MNLI"}
    assert {pair for pair in found if pair[0] in tasks} == {
        (task, protocol["metrics"][task]) for task in tasks
    }
    assert protocol["metrics"]["CoLA"] == "matthews"


def test_the_reports_example_is_its_text_character_for_character():
    """Of its two apostrophes one is typographic; the reference has no full stop at its end."""
    example = DATA["finetuning"]["translation"]["iwslt17"]["example"]
    assert example == {
        "source": "Ce dont vous avez peur n\u2019est jamais aussi grave que ce que vous imaginez. "
        "La peur que vous laissez s'accumuler dans votre esprit est pire que la situation qui "
        "existe r\u00e9ellement.",
        "target": "What you are afraid of is never as bad as what you imagine. The fear you let "
        "build up in your mind is worse than the situation that actually exists",
    }


def test_fine_tuning_has_a_schedule_for_every_task():
    glue = DATA["finetuning"]["glue"]
    assert set(glue["m4m"]["tasks"]) == set(glue["decbert"]["tasks"])
    for protocol in glue.values():
        assert set(protocol["metrics"]) == set(protocol["tasks"])
    for task, settings in glue["decbert"]["per_task"].items():
        share = settings["warmup_updates"] / settings["total_num_update"]
        assert share == pytest.approx(0.25 if task == "QQP" else 0.06, abs=0.001)


def test_the_data_is_part_of_an_installation():
    """The loader finds the file beside itself, whatever the working directory."""
    module = "fairseq_posenc.workbench.training.recipes"
    program = f"from {module} import load; print(len(load()['pretraining']))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd="/", capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == str(len(NAMES))
