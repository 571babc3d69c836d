"""Registers our models and tasks with fairseq, and imports packages of users' own encodings."""

import gc
import logging
import os
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

from fairseq_posenc.error_messages import describe_mistake
from fairseq_posenc.errors import UserError

USER_DIR = Path(__file__).resolve().parent
MODULES = (  # which register models, tasks and criterions when they are imported
    "tasks.answers",
    "tasks.glue",
    "tasks.squad",
    "models.masked_lm",
    "models.causal_lm",
    "models.translation",
)
# DecBERT's architectures, with the attention directions of their first two layers (lr: from left
# to right). They are here, not in `models`, because commands list them without importing fairseq.
DECBERT = {"decbert_same": "lr,lr", "decbert_diff": "lr,rl"}


def find_shipped_folder(name: str) -> Path:
    """Find a folder that lies inside the package in a wheel, and beside it in a checkout."""
    inside = USER_DIR / name
    return inside if inside.is_dir() else USER_DIR.parent / name


def register() -> None:
    """Register models, and tasks with their criterions, with fairseq, as ``--user-dir`` does.

    Raises:
        UserError: fairseq, or a package that it needs, is not installed.
    """
    _ignore_garbage_in_forks()
    # A task for speech would log at each start that tensorboardX is missing.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    root = logging.getLogger()  # fairseq's first import makes it show every message of INFO
    handlers, level = root.handlers[:], root.level
    try:
        for name in MODULES:
            import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        if message := describe_mistake(error):  # for packages that a user may lack
            raise UserError(message) from error
        raise
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@cache  # once per process
def _ignore_garbage_in_forks() -> None:
    """Keep forked processes from collecting garbage of their parents.

    The garbage may include iterators of a ``DataLoader``, whose end in another process than their
    own prints a stack trace, "can only test a child process".
    """
    os.register_at_fork(after_in_child=gc.freeze)


def import_user_dir(folder: Path) -> None:
    """Import a package, which registers encodings, by its folder.

    Raises:
        UserError: the folder has no package, or Python has another module of its name.
    """
    folder = folder.resolve()
    if not (folder / "__init__.py").is_file() or "." in folder.name:
        why = "name a folder of a Python package, with __init__.py and with no dot in its name"
        raise UserError(f"--user-dir {folder}: {why}")
    sys.path.insert(0, str(folder.parent))
    paths = [Path(path).resolve() for path in getattr(import_module(folder.name), "__path__", ())]
    if folder not in paths and folder.name != USER_DIR.name:  # of this package, any copy will do
        sys.path.remove(str(folder.parent))
        raise UserError(f"--user-dir {folder}: Python has another module {folder.name}; rename it")


class RegisteringPath(list[str]):
    """The package's ``__path__``, which registers our names when fairseq looks for its user-dir.

    fairseq imports a user-dir, its ``tasks`` and its ``models``. But if a program has
    imported the package before, fairseq only checks that ``__path__`` contains the path that the
    user gave, and assumes that names are registered. So any path to the package registers them.
    """

    def __contains__(self, path: object) -> bool:
        """Check whether a path leads to the package; if so, register its names with fairseq."""
        name = str(path)
        if not os.path.exists(name) or not any(os.path.samefile(name, folder) for folder in self):
            return False
        register()
        return True
