"""Makes the YAML files of ``train_scripts/configs`` and ``finetune_configs`` from the recipes.

fairseq's dataclasses determine the section of an option.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY
from fairseq.optim.lr_scheduler import LR_SCHEDULER_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY

from fairseq_posenc.tasks.glue.definitions import TASKS, Task
from fairseq_posenc.workbench.running import host  # noqa: F401  (registers models and tasks)
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.recipes import TRANSLATION, Recipe, largest_share

MISSING = "???"
_REGISTRIES = {
    "task": TASK_DATACLASS_REGISTRY,
    "criterion": CRITERION_DATACLASS_REGISTRY,
    "optimizer": OPTIMIZER_DATACLASS_REGISTRY,
    "lr_scheduler": LR_SCHEDULER_DATACLASS_REGISTRY,
}
_FAIRSEQ = FairseqConfig()
_COMMON_SECTIONS = ("common", "distributed_training", "dataset", "optimization", "checkpoint")
# All sections, in their order in a file.
_SECTIONS = ["common", "task", "criterion", "model", "distributed_training", "dataset"]
_SECTIONS += ["optimizer", "lr_scheduler", "optimization", "checkpoint"]
_COMMENTS = {
    "data": "full path; several joined by colons",
    "required_batch_size_multiple": "or fairseq drops the end of an epoch",
    "skip_invalid_size_inputs_valid_test": "sentences of more than 512 tokens; the log counts them",
    "find_unused_parameters": "the head of the masked language model",
    "share_decoder_input_output_embed": "needed for the paper's 95 M parameters",
}
_PLUGIN = {"user_dir": "fairseq_posenc", "data": MISSING}
_ONE_FOLDER = {"data": "full path"}  # of the tasks glue and squad
_NOT_GIVEN = "not in the paper"
# Keys of SQuAD's recipe that are not options of fairseq.
_NOT_OF_SQUAD = {"seeds", "warmup_ratio", "doc_stride", "max_answer_length", "n_best"}
_NOTE = "Made by `make docs` from the recipes."


class Configuration(NamedTuple):
    """The content of a YAML file."""

    head: list[str]  # lines of the comment at its beginning
    options: Mapping[str, Any]  # values by option of fairseq; the model's name is `arch`
    notes: Mapping[str, str]  # comments by option
    shared: str = ""  # name, without suffix, of the file with shared settings; empty without one


def _format_folder(folder: Path, configurations: Mapping[str, Configuration]) -> dict[Path, str]:
    """Format all files of a folder, including those with shared settings."""
    files = {}
    common: dict[str, dict[str, Any]] = {"": {}}
    names = {configuration.shared for configuration in configurations.values()}
    for shared in sorted(names - {""}):
        sharing = [entry for entry in configurations.values() if entry.shared == shared]
        common[shared] = _collect_shared_entries([entry.options for entry in sharing])
        head = [f"Settings that several files share; they include them as `{shared}`."]
        whole = Configuration(
            head, common[shared], _collect_shared_entries([entry.notes for entry in sharing])
        )
        files[folder / f"{shared}.yaml"] = _format_yaml(whole, common[shared])
    for name, configuration in configurations.items():
        shared_options = common[configuration.shared]
        options = {k: v for k, v in configuration.options.items() if k not in shared_options}
        files[folder / f"{name}.yaml"] = _format_yaml(configuration, options)
    return files


def _collect_shared_entries(mappings: list[Mapping[str, Any]]) -> dict[str, Any]:
    first, *others = mappings
    return {k: v for k, v in first.items() if all(k in other and other[k] == v for other in others)}


def _format_yaml(configuration: Configuration, options: Mapping[str, Any]) -> str:
    """Format some options of a configuration as YAML."""
    sections: dict[str, list[str]] = {name: [] for name in _SECTIONS}
    for option, value in options.items():
        section, name = _find_section(option, configuration.options)
        note = configuration.notes.get(option) or _COMMENTS.get(option)
        line = f"  {name}: {value if isinstance(value, str) else json.dumps(value)}"
        sections[section].append(f"{line} # {note}" if note else line)
    lines = [f"# {line}".rstrip() for line in configuration.head]
    if configuration.shared:
        lines += ["", "defaults:", "  - _self_", f"  - {configuration.shared}"]
    for name, body in sections.items():
        if body:
            body.sort(key=lambda line: not line.startswith("  _name:"))
            lines += ["", f"{name}:", *body]
    return "\n".join(lines) + "\n"


def _find_section(option: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """Find the section of an option in fairseq's configuration, and its name there."""
    if option == "arch":
        return "model", "_name"
    if option in _REGISTRIES:
        return option, "_name"
    sections = {name: getattr(_FAIRSEQ, name) for name in _COMMON_SECTIONS}
    for name, registry in _REGISTRIES.items():
        sections[name] = registry.get(options.get(name))
    for name, dataclass in sections.items():
        if dataclass and option in {field.name for field in fields(dataclass)}:
            return name, option
    return "model", option


def format_files(root: Path) -> dict[Path, str]:
    """Format every file below ``train_scripts/configs`` and ``finetune_configs``."""
    training, finetuning = root / "train_scripts" / "configs", root / "finetune_configs"
    squad = recipes.load()["finetuning"]["squad"]["m4m"]
    others = {name_squad(v): _configure_squad(squad, v) for v in squad["versions"]}
    others[TRANSLATION] = _configure_training(recipes.build_recipe(TRANSLATION), "finetune_configs")
    glue = {
        task.config_name(protocol): _configure_glue(protocol, task)
        for protocol in recipes.load()["finetuning"]["glue"]
        for task in TASKS.values()
    }
    pretraining = {
        name: _configure_training(recipes.build_recipe(name), "train_scripts/configs")
        for name in recipes.load()["pretraining"]
    }
    return {
        **_format_folder(training, pretraining),
        **_format_folder(finetuning, others),
        **_format_folder(finetuning / "glue", glue),
    }


def name_squad(version: str) -> str:
    """Name the files of a version of SQuAD, such as ``squad11``."""
    return f"squad{version.replace('.', '')}"


def _configure_training(recipe: Recipe, config_dir: str) -> Configuration:
    gpus = recipe.hardware.get("gpus", 1)
    per_gpu = largest_share(recipe.batch, gpus, recipe.per_gpu)
    assert per_gpu is not None
    options = {
        **_PLUGIN,
        "arch": recipe.arch,
        "position_encoding": MISSING,
        **recipe.all_settings,
        **recipe.housekeeping,
        "distributed_world_size": gpus,
        ("batch_size" if recipe.unit == "sequences" else "max_tokens"): per_gpu,
        "update_freq": [recipe.batch // (gpus * per_gpu)],
        "save_dir": _format_save_dir(recipe),
        **_list_file_only_options(recipe),
    }
    notes = dict.fromkeys(recipe.not_given, _NOT_GIVEN)
    keeps = f"for another number change update_freq too: the product stays {recipe.batch}"
    notes.update({"distributed_world_size": keeps, "finetune_from_model": "full path"})
    shared = "masked_lm" if recipe.all_settings["task"] == "masked_lm" else ""
    return Configuration(_format_head_comment(recipe, config_dir, gpus), options, notes, shared)


def _list_file_only_options(recipe: Recipe) -> dict[str, Any]:
    """List the options that a configuration file needs, but a command line does not."""
    settings = recipe.all_settings
    options: dict[str, Any] = {}
    if settings["task"] == "masked_lm":
        options["max_positions"] = settings["tokens_per_sample"]
    if recipe.init.startswith("roberta"):
        options["finetune_from_model"] = MISSING
    if recipe.warmup_epochs:  # warm-up, hold and decay, as shares of `max_update`
        rise = recipe.warmup_epochs / settings["max_epoch"]
        options.update({"seed": 1, "phase_ratio": [rise, 0.0, 1 - rise], "max_update": MISSING})
    return options


def _format_save_dir(recipe: Recipe) -> str:
    name = "${model.position_encoding}"
    name = f"${{model._name}}-{name}" if recipe.has_models else name
    seed = "/seed${common.seed}" if recipe.seeds else ""
    return f"${{hydra:runtime.cwd}}/checkpoints/{recipe.name}/{name}{seed}"


def _format_head_comment(recipe: Recipe, config_dir: str, gpus: int) -> list[str]:
    changes, remarks = ["model.position_encoding=m4m"], []
    if recipe.has_models:
        changes.append("model._name=decbert_diff")
        remarks.append("Or decbert_same; without model._name it is BERT.")
    if recipe.init.startswith("roberta"):
        changes.append(f"checkpoint.finetune_from_model=$PWD/{recipe.init}.m4m.pt")
    if recipe.init == "not given":  # in the paper
        remarks.append("To start from a released RoBERTa: checkpoint.finetune_from_model=FILE")
    if recipe.warmup_epochs:
        changes.append("optimization.max_update=N")
        epochs = recipe.settings["max_epoch"]
        remarks.append(f"N is {epochs} times the updates of an epoch, which that command prints.")
    return [
        f"{recipe.title} ({_cite(recipe.source)}{recipe.where}).",
        f"As `fairseq-posenc train-recipe {recipe.name}` on {gpus} GPU{'s' * (gpus > 1)}. {_NOTE}",
        "",
        f"  fairseq-hydra-train --config-dir {config_dir} --config-name {recipe.name} \\",
        f"      task.data=$PWD/data-bin/text {' '.join(changes)}",
        *(["", *remarks] if remarks else []),
    ]


def _cite(source: str) -> str:
    paper = recipes.load()["sources"][source]
    return f"arXiv:{paper['arxiv']}, " if paper["arxiv"] else ""


def _configure_glue(protocol: str, task: Task) -> Configuration:
    recipe = recipes.load()["finetuning"]["glue"][protocol]
    settings = {
        **recipe["not_given"],
        **recipe["settings"],
        **recipe.get("per_task", {}).get(task.name, {}),
    }
    rates = settings.pop("lr")
    updates = settings.pop("total_num_update", 0)  # fairseq's option is `max_update`
    options = {
        **_start_finetuning("glue"),
        "lr": rates[:1],
        "learning_rates": rates,
        "max_update": updates,
        "warmup_updates": 0,  # a protocol may have its own
        **settings,
        "best_checkpoint_metric": recipe["metrics"][task.name],
    }
    if len(task.valid_splits) > 1:
        options["valid_subset"] = ",".join(task.valid_splits)
    notes = {
        **_ONE_FOLDER,
        "arch": "with all other options of the pre-trained model",
        "lr": "of a single training",
        "valid_subset": "matched, which chooses the checkpoint, and mismatched",
    }
    if "warmup_ratio" in settings:
        notes["max_update"] = f"set it to the updates of {settings['max_epoch']} epochs"
        notes["warmup_updates"] = "set it to warmup_ratio of max_update"
    head = [
        f"GLUE, {task.name}: the protocol of {_cite(recipe['source'])}{recipe['where']}.",
        _NOTE,
    ]
    return Configuration(head, options, notes, "shared")


def _start_finetuning(task: str) -> dict[str, Any]:
    """List the first options of the files of a task."""
    return {
        **_PLUGIN,
        "arch": MISSING,
        "task": task,
        "criterion": task,
        "distributed_world_size": 1,
        **recipes.housekeeping(task),
    }


def _configure_squad(recipe: dict[str, Any], version: str) -> Configuration:
    settings = {**recipe["settings"], **recipe["not_given"]}
    batch, per_gpu = settings.pop("batch_size"), recipe["per_gpu"]
    del settings["max_positions"]  # set by the windows of the data
    options = {
        **_start_finetuning("squad"),
        "seed": settings["seeds"][0],
        **{name: value for name, value in settings.items() if name not in _NOT_OF_SQUAD},
        "batch_size": per_gpu,
        "update_freq": [batch // per_gpu],
        "max_update": MISSING,
        "warmup_updates": MISSING,
        "save_dir": MISSING,
        "finetune_from_model": MISSING,
    }
    notes = {
        **_ONE_FOLDER,
        **dict.fromkeys(recipe["not_given"], _NOT_GIVEN),
        "arch": "with all other options of the pre-trained model",
        "lr": "and 2.5e-5 for raffel and tupe, which diverged at 3e-5",
        "max_update": f"the updates of {settings['max_epoch']} epochs",
        "warmup_updates": f"{settings['warmup_ratio']:.0%} of max_update",
    }
    data = f"data-bin/{name_squad(version)}"
    head = [
        f"SQuAD {version} ({_cite(recipe['source'])}{recipe['where']}). {_NOTE}",
        "",
        f"  fairseq-posenc squad train --checkpoint pretrained.pt --data {data} --out DIR",
        "",
        "sets all values that are missing here, and divides the batch among GPUs.",
    ]
    return Configuration(head, options, notes)
