"""Files that fairseq opens because a setting of a task, model or criterion names them.

Each of them is set up from settings that name a file of their own, one setting after the other,
while Python reports what is opened. What a C++ library opens is not reported.
"""

from __future__ import annotations

import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import criterions, models, tasks
from fairseq.data import Dictionary

from fairseq_posenc.checkpoints.trusted_settings import IN_DATA, OPENED
from tests.helpers.commands import pairs, sentences
from tests.helpers.products import some_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
# What models need beside their own options, from those of a task or of a training.
MODEL: dict[str, Any] = {
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1),
    **dict.fromkeys(("tokens_per_sample", "max_source_positions", "max_target_positions"), 16),
    **{"input_feat_per_channel": 80, "input_channels": 1, "n_frames_per_step": 1, "fp16": False},
    **{"criterion": "cross_entropy", "decoder_layers_to_keep": None, "autoregressive": True},
}
_watched: list[Path] = []
_opened: set[str] = set()


def _note(event: str, given: tuple[Any, ...]) -> None:
    if _watched and event in ("open", "os.listdir", "os.scandir") and isinstance(given[0], str):
        for folder in _watched:
            if given[0].startswith(f"{folder}/"):
                _opened.add(given[0][len(str(folder)) + 1 :].partition("/")[0].partition(".")[0])


sys.addaudithook(_note)


@contextmanager
def watched(folder: Path) -> Iterator[set[str]]:
    """Note the names of files of a folder that are opened meanwhile."""
    _opened.clear()
    _watched.append(folder)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield _opened
    finally:
        _watched.clear()


@cache
def data() -> Path:
    """Make a folder with the data of a language model, of a translation, and of pairs."""
    folder = sentences().parent / "of-all-tasks"
    for source in (sentences(), pairs()):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    for name in ("input0", "input1", "label"):
        shutil.copytree(sentences(), folder / name)
    return folder


def list_settings(kind: Any) -> tuple[Namespace, list[str]]:
    """Return the defaults of a task's, model's or criterion's options, and those that hold text."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False, conflict_handler="resolve")
    with suppress(Exception):
        kind.add_args(parser)
    defaults = Namespace(**{action.dest: action.default for action in parser._actions})
    names = [
        action.dest
        for action in parser._actions
        if action.nargs != 0 and not action.choices
        if action.default is None or isinstance(action.default, str)
    ]
    return defaults, [name for name in names if name != "data"]


def find_opened(kind: Any, more: dict[str, Any], start: Callable[[Namespace], Any]) -> set[str]:
    """Return the settings of a kind whose files are opened when it is set up."""
    defaults, names = list_settings(kind)
    folder = data().parent / "canaries"
    folder.mkdir(exist_ok=True)
    found: set[str] = set()
    for name in names:
        path = folder / name
        path.write_text("w1 1\n")
        # An architecture fills in what is missing, or needs what is None: both are tried.
        given = {option: value for option, value in vars(defaults).items() if value is not None}
        for base in (vars(defaults), given):
            settings = Namespace(**{**MODEL, **base, **more, name: str(path)})
            with watched(folder) as opened, suppress(Exception, SystemExit):
                start(settings)
            found |= opened
    return found


def fairseqs(registry: dict[str, Any], step: int = 1) -> list[str]:
    """Return the names in a registry that are fairseq's own, or some where products are not whole.

    They change with the release of fairseq alone, and many share the code that opens files.
    """
    names = sorted(n for n, kind in registry.items() if kind.__module__.startswith("fairseq."))
    return some_of(names[::step], names)


def start_task(name: str) -> Callable[[Namespace], Any]:
    def start(settings: Namespace) -> None:
        task = tasks.setup_task(settings)
        steps = [
            lambda: task.load_dataset("train", epoch=1, combine=False),
            lambda: task.load_dataset("valid", epoch=1, combine=False),
            lambda: task.build_generator([], settings),
            lambda: task.build_model(settings),
            lambda: task.build_criterion(settings),
            lambda: task.build_tokenizer(settings),
            lambda: task.build_bpe(settings),
        ]
        for step in steps:
            with suppress(Exception, SystemExit):
                step()

    return start


def task_settings(name: str) -> dict[str, Any]:
    """Return settings with which most tasks can be set up on the data."""
    lists = name in ("translation_multi_simple_epoch", "multilingual_translation")
    return {
        "task": name,
        # The other task looks for its own files among all that are called train.
        "data": str(pairs() if name == "translation_multi_simple_epoch" else data()),
        "source_lang": None if lists else "src",
        "target_lang": None if lists else "tgt",
        "lang_pairs": ["src-tgt"] if name == "translation_multi_simple_epoch" else "src-tgt",
        "langs": ["src", "tgt"] if name == "translation_multi_simple_epoch" else "src,tgt",
        "seed": 1,
        "dataset_impl": None,
        "max_source_positions": 64,
        "max_target_positions": 64,
        "tokens_per_sample": 16,
        "sampling_method": "concat",
        "train_subset": "train",
        "valid_subset": "valid",
        "num_workers": 0,
        "arch": "transformer_tiny",
        "criterion": "cross_entropy",
        "virtual_epoch_size": None,
        "distributed_world_size": 1,
    }


def start_model(kind: Any) -> Callable[[Namespace], Any]:
    dictionary = Dictionary()
    dictionary.add_symbol("w1")
    task = SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        src_dict=dictionary,
        tgt_dict=dictionary,
        dictionary=dictionary,
        dicts={"src": dictionary, "tgt": dictionary},
        langs=["src", "tgt"],
        lang_pairs=["src-tgt"],
        model_lang_pairs=["src-tgt"],
        max_positions=lambda: 16,
        get_speaker_embeddings=lambda settings: None,
        dictionaries=[dictionary],
        cfg=SimpleNamespace(),
        args=Namespace(),
    )

    def start(settings: Namespace) -> None:
        with torch.device("meta"):
            kind.build_model(settings, task)

    return start


@pytest.mark.parametrize("name", fairseqs(tasks.TASK_REGISTRY, 2))
def test_files_that_a_task_opens_are_in_the_table(name):
    kind = tasks.TASK_REGISTRY[name]
    assert find_opened(kind, task_settings(name), start_task(name)) <= OPENED | IN_DATA


@pytest.mark.parametrize("name", fairseqs(models.MODEL_REGISTRY, 4))
def test_files_that_a_model_opens_are_in_the_table(name):
    kind = models.MODEL_REGISTRY[name]
    architectures = models.ARCH_MODEL_INV_REGISTRY.get(name, [name])
    prepare = models.ARCH_CONFIG_REGISTRY.get(architectures[0], lambda settings: None)
    build = start_model(kind)

    def start(settings: Namespace) -> None:
        with suppress(Exception):
            prepare(settings)
        for option, value in vars(settings).items():
            if option.endswith("layers") and type(value) is int:
                setattr(settings, option, 1)
            # Some of its layers are not made on the device of the model, and take seconds.
            if option.endswith("layers") and type(value) is str and value.startswith("[("):
                setattr(settings, option, "[(8, 2)]")
        build(settings)

    assert find_opened(kind, {"arch": architectures[0]}, start) <= OPENED | IN_DATA


@pytest.mark.parametrize("name", fairseqs(criterions.CRITERION_REGISTRY, 2))
def test_files_that_a_criterion_opens_are_in_the_table(name):
    kind = criterions.CRITERION_REGISTRY[name]
    settings = Namespace(task="language_modeling", data=str(sentences()), tokens_per_sample=16)
    task = tasks.setup_task(settings)

    def start(settings: Namespace) -> None:
        kind.build_criterion(settings, task)

    assert find_opened(kind, {"criterion": name}, start) <= OPENED | IN_DATA


def test_what_is_watched_is_seen():
    """The observation finds what is known: else the tests above would show nothing."""
    kind = tasks.TASK_REGISTRY["translation_multi_simple_epoch"]
    name = "translation_multi_simple_epoch"
    found = find_opened(kind, task_settings(name), start_task(name))
    assert {"fixed_dictionary", "source_dict", "sampling_weights_from_file"} <= found
    kind = models.MODEL_REGISTRY["lstm"]
    assert "encoder_embed_path" in find_opened(kind, {"arch": "lstm"}, start_model(kind))
    kind = models.MODEL_REGISTRY["hubert_ctc"]
    assert "w2v_path" in find_opened(kind, {"arch": "hubert_ctc"}, start_model(kind))
