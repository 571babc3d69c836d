"""``--user-dir`` in every form that fairseq accepts, from any working directory.

The commands differ in when they import it; the forms in how fairseq finds it. Each command is here
with one form at least, and each form with several commands. The other tests use absolute paths.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fairseq_posenc.errors import UserError
from fairseq_posenc.user_dir import import_user_dir
from tests.helpers.commands import (
    SENTENCES,
    USER_DIR,
    assert_positions,
    new_directory,
    pairs,
    run,
    sentences,
    train,
    trained,
    validate,
)
from tests.helpers.products import some_of
from tests.helpers.programs import true_start

pytestmark = pytest.mark.slow
BY_NAME = "fairseq_posenc"


def relative(directory):
    return os.path.relpath(USER_DIR, directory)


def test_train_by_name():
    model = train("causal_lm", "--max-epoch", 1, "--no-save", user_dir=BY_NAME)
    assert_positions(model.run, "causal_lm")


def test_train_by_relative_path():
    here = new_directory()
    model = train("masked_lm", "--max-epoch", 1, "--no-save", user_dir=relative(here), cwd=here)
    assert_positions(model.run, "masked_lm")


BEFORE = """
import sys
import fairseq_posenc.api
from argparse import Namespace
from fairseq import utils
from fairseq.models import MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
assert "positional_roberta" not in MODEL_REGISTRY
for _ in range(2):
    utils.import_user_module(Namespace(user_dir=sys.argv[1]))
assert {"positional_roberta", "transformer_lm_rope"} <= set(MODEL_REGISTRY)
assert {"glue", "squad"} <= set(TASK_REGISTRY)
"""

QUIET = """
import logging
import fairseq_posenc.workbench.loading.open_model, fairseq_posenc.workbench.translation.translator
root = logging.getLogger()
assert (root.handlers, root.level) == ([], logging.WARNING), root.handlers
"""

FAILING = """
import logging, sys
from fairseq_posenc.user_dir import register
sys.modules["fairseq_posenc.models.translation"] = None  # importing it fails
try:
    register()
except ModuleNotFoundError:
    root = logging.getLogger()
    sys.exit((root.handlers, root.level) != ([], logging.WARNING))
raise AssertionError
"""
PROGRAMS = {"registers later": BEFORE, "keeps its logging": QUIET, "also after a failure": FAILING}


@pytest.mark.parametrize("name", some_of(["registers later", "keeps its logging"], PROGRAMS))
def test_a_program_that_imports_the_package_itself(name):
    command = [sys.executable, "-c", PROGRAMS[name], BY_NAME]
    env = true_start()  # what comes first is what this is about
    done = subprocess.run(command, env=env, cwd=new_directory(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr or name == "registers later"  # which imports fairseq, too


def test_loaders_leave_those_of_their_parent_alone():
    """A loader that became garbage, with others of its cycle, is collected in its own process."""
    program = """
import gc
from types import SimpleNamespace
from torch.utils.data import DataLoader
from fairseq_posenc.user_dir import register

class Texts(list):
    def __getitem__(self, index):
        gc.collect()
        return super().__getitem__(index)

register()
gc.disable()
garbage = SimpleNamespace()
garbage.itself, garbage.loaded = garbage, iter(DataLoader(Texts(range(8)), num_workers=1))
next(garbage.loaded)
del garbage
print(len(list(DataLoader(Texts(range(8)), num_workers=1))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "8\n"
    assert "can only test a child process" not in done.stderr


def test_another_copy_is_not_taken_for_the_package(tmp_path):
    other = tmp_path / "fairseq_posenc"
    other.mkdir()
    assert "is not globally unique" in run("python", "-c", BEFORE, other, fails=True).err


def test_train_in_the_directory_above_the_package():
    """Here the name is a relative path too."""
    once = ("--max-epoch", 1, "--no-save")
    model = train("translation", *once, user_dir=BY_NAME, cwd=USER_DIR.parent)
    assert_positions(model.run, "translation")


def test_validate_by_name():
    path = trained("translation").save_dir / "checkpoint_last.pt"
    assert_positions(validate("translation", path, user_dir=BY_NAME), "translation")


def test_generate_by_relative_path():
    here = new_directory()
    path = trained("translation").save_dir / "checkpoint_last.pt"
    data = os.path.relpath(pairs(), here)
    words = (data, "--user-dir", relative(here), "--path", os.path.relpath(path, here))
    done = run("fairseq-generate", *words, "--required-batch-size-multiple", 1, cwd=here)
    assert_positions(done, "translation")
    assert done.out.count("\nH-") == SENTENCES["test"]


SETTINGS = [
    *("++common.cpu=true", "++dataset.batch_size=16", "++dataset.required_batch_size_multiple=1"),
    *("++dataset.num_workers=0", "++optimizer._name=adam", "++lr_scheduler._name=fixed"),
    *("++optimization.lr=[0.001]", "++optimization.max_epoch=2"),
]
MASKED_LM = """# @package _group_
common:
  user_dir: {user_dir}
task:
  _name: masked_lm
  data: {data}
  sample_break_mode: complete
  tokens_per_sample: 16
criterion: masked_lm
model:
  _name: roberta_learned_tiny
  max_positions: 16
  position_encoding: learned+m4m(max_distance=5)
  attention_directions: lr
"""


def hydra_train(*words, cwd=None):
    """Train with settings; return the lines of positions, and the path of the checkpoint."""
    save_dir = new_directory()
    given = (*words, *SETTINGS, f"++checkpoint.save_dir={save_dir}")
    done = run("fairseq-hydra-train", *given, cwd=cwd)
    return done.positions(), save_dir / "checkpoint_last.pt"


def test_hydra_train_a_masked_lm_by_absolute_path():
    text, here = MASKED_LM.format(user_dir=USER_DIR, data=sentences()), new_directory()
    (here / "experiment.yaml").write_text(text, encoding="utf-8")
    (line,), path = hydra_train("--config-dir", here, "--config-name", "experiment")
    assert line.startswith("learned+m4m(max_distance=5) | directions: lr x1 both x1 |")
    assert validate("masked_lm", path).positions() == [line]


def test_hydra_train_translation_by_name():
    words = [f"common.user_dir={BY_NAME}", "task=translation", f"task.data={pairs()}"]
    words += ["+model._name=transformer_rope_tiny", "+model.position_encoding_decoder=sinusoidal"]
    (encoder, decoder), path = hydra_train(*words)
    assert encoder.startswith("rope | directions: both x2 |")
    assert decoder.startswith("sinusoidal | directions: lr x2 |")
    one = ("--required-batch-size-multiple", 1)
    loaded = run("fairseq-generate", pairs(), "--user-dir", BY_NAME, "--path", path, *one)
    assert loaded.positions() == [encoder, decoder]


def test_hydra_train_a_causal_lm_by_relative_path():
    here = new_directory()
    words = [f"common.user_dir={relative(here)}", "task=language_modeling"]
    words += [f"task.data={sentences()}", "task.sample_break_mode=complete"]
    words += ["task.tokens_per_sample=16", "+model._name=transformer_lm_rope_tiny"]
    (line,), _ = hydra_train(*words, cwd=here)
    assert line.startswith("rope | directions: lr x2 |")


@pytest.mark.parametrize("name", ["encodings", "time", "posenc.2"])  # Python has the first two
def test_folders_that_python_does_not_import_by_their_names_are_refused(tmp_path, name):
    message = "no dot in its name" if "." in name else f"another module {name}; rename it"
    folder, before = tmp_path / name, [*sys.path]
    folder.mkdir()
    (folder / "__init__.py").touch()
    with pytest.raises(UserError, match=message):
        import_user_dir(folder)
    assert sys.path == before
