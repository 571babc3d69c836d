"""The commands that train and measure what a row of the papers is about, and their tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fairseq_posenc.workbench.training import recipes

Entry = Mapping[str, Any]

_SCRIPTS = "test_train_scripts_pretraining.py"
_GLUE_TESTS = {
    "dev": "test_glue_commands.py::test_the_results_go_into_a_report",
    "test": "test_glue_commands.py::test_predictions_for_the_test_sets_are_as_glue_takes_them",
}
_LOG_TESTS = {  # by metric and split
    ("perplexity", "valid"): "test_the_command_writes_table_and_picture",
    ("epoch", "valid"): "test_who_reaches_the_other_perplexity_when",
    ("loss", "train"): "test_the_command_tells_stages_and_epochs_and_draws_the_training",
    ("dive ends", "train"): "test_the_stages_are_found_to_the_line",
}
_GLUE = ("MNLI", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE")


def training(row: Entry) -> tuple[str, str]:
    """Return the command that makes a row's model, and the test of its settings.

    Args:
        row: with ``recipe``, ``position_encoding`` and, if it has them, ``attention_directions``.
    """
    recipe, encoding = row["recipe"], row["position_encoding"]
    quoted = f"'{encoding}'" if "(" in encoding else encoding
    if "texts" in row:  # a count, which needs no training
        test = "test_documentation.py::test_count_prints_the_numbers_of_the_papers_tables"
        return f"fairseq-posenc count --encoding {quoted}", test
    if recipe.startswith("translation/"):
        test = "test_train_scripts_translation.py::test_the_settings_are_the_reports"
        return f"train_scripts/translation_iwslt17.sh {quoted} DATA-BIN", test
    size = "_large" if recipe == "a_large" else ""
    start = recipes.load()["pretraining"][recipe]["init"]
    init = f"fairseq-posenc init --from {start}/model.pt --arch roberta_{encoding}{size}"
    if row.get("released"):
        test = "test_init.py::test_with_learned_positions_the_start_is_the_released_model"
        return f"{init} --out CHECKPOINT", test
    directions = row.get("attention_directions", "both")
    command = f"train_scripts/{recipe}.sh {quoted} DATA-BIN"
    if recipe in ("b_small", "b_large"):
        command += f" --model {recipes.model_of(directions)}"
    if start.startswith("roberta."):
        command = f"{init} --out start.pt && {command} --init start.pt"
    return command, _test(recipe, encoding, directions)


def _test(recipe: str, encoding: str, directions: str) -> str:
    entry = recipes.load()["pretraining"][recipe]
    if encoding in entry["position_encodings"] and directions in entry["attention_directions"]:
        run = f"{recipe}-{encoding}-{directions}"
        return f"{_SCRIPTS}::test_the_settings_are_the_recipes[{run}]"
    for name, ablation in recipes.load()["ablations"].items():
        runs = [
            (run["position_encoding"], run.get("attention_directions", "both"))
            for run in ablation["runs"]
        ]
        if ablation["recipe"] == recipe and (encoding, directions) in runs:
            test = "test_an_ablation_trains_its_models_each_in_a_folder_of_its_own"
            return f"{_SCRIPTS}::{test}[{name}]"
    raise LookupError(f"no test trains {recipe} with {encoding}, {directions}")


def evaluations(table: Entry) -> Iterator[tuple[str, str]]:
    """Yield the commands that measure the figures of a table, each with its test."""
    columns = table["columns"].values()
    for split, test in _GLUE_TESTS.items():
        found = {column["task"] for column in columns if column["split"] == split}
        tasks = [task for task in _GLUE if found & {task, f"{task}-m"}]
        if tasks:
            what = f"--protocol {table['source']} --tasks {','.join(tasks)}"
            yield f"fairseq-posenc glue --checkpoint CHECKPOINT --data DATA-BIN {what}", test
    for version in ("1.1", "2.0"):
        if any(column["task"] == f"SQuAD{version}" for column in columns):
            yield from _squad(version)
    yield from _of_the_log(table)
    if table["source"] == "fr_en":
        tests = "test_translation_commands.py"
        test = f"{tests}::test_bleu_4_on_pieces_is_the_published_formula"
        yield "fairseq-posenc bleu --data DATA-BIN NAME=CHECKPOINT", test
        test = f"{tests}::test_translate_knows_the_reports_example"
        yield "fairseq-posenc translate --checkpoint CHECKPOINT --example", test


def _squad(version: str) -> Iterator[tuple[str, str]]:
    out = f"squad{version.replace('.', '')}"
    train = f"fairseq-posenc squad train --checkpoint CHECKPOINT --data DATA-BIN --out {out}"
    yield train, "test_squad_commands.py::test_the_recipe_is_the_papers"
    files = f"--questions dev-v{version}.json --out {out}/dev"
    predict = f"fairseq-posenc squad predict --checkpoint {out}/checkpoint_last.pt {files}"
    yield predict, "test_squad_commands.py::test_twenty_questions_learnt_by_heart_are_answered"


def _of_the_log(table: Entry) -> Iterator[tuple[str, str]]:
    """Yield what is read from the log of the training."""
    metrics = {(column["metric"], column["split"]) for column in table["columns"].values()}
    for figure, test in _LOG_TESTS.items():
        if figure in metrics:
            yield "fairseq-posenc curves NAME=FOLDER/train.log", f"test_curves.py::{test}"


def finetuning(protocols: Entry) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the fine-tunings of the papers: what, the command, and tests."""
    for name, entry in protocols["glue"].items():
        command = f"fairseq-posenc glue --checkpoint CHECKPOINT --data DATA-BIN --protocol {name}"
        tests = ["test_glue_commands.py::test_tasks_are_learnt_and_reported"]
        yield f"GLUE, {name}, {entry['where']}", f"{command} --tasks all", tests
    for name, entry in protocols["squad"].items():
        for version in entry["versions"]:
            (train, test), _ = _squad(version)
            rate = "test_squad_commands.py::test_what_diverges_at_the_usual_rate_has_one_of_its_own"
            yield f"SQuAD {version}, {name}, {entry['where']}", train, [test, rate]
    for name, entry in protocols["translation"].items():
        for encoding in entry["position_encodings"]:
            row = {"recipe": f"translation/{name}", "position_encoding": encoding}
            command, test = training(row)
            yield f"{name}, {entry['where']}: `{encoding}`", command, [test]
