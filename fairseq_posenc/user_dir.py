"""The package as a ``--user-dir`` of fairseq."""

import os
from importlib import import_module
from pathlib import Path

from fairseq_posenc.error_messages import describe_mistake
from fairseq_posenc.errors import UserError

USER_DIR = Path(__file__).resolve().parent
MODULES = (
    *("tasks.answers", "tasks.glue", "tasks.squad"),
    *("models.masked_lm", "models.causal_lm", "models.translation"),
)


def register() -> None:
    """Register models, tasks and criterions with fairseq, as it does on loading a user-dir.

    Raises:
        UserError: fairseq is not installed.
    """
    try:
        for name in MODULES:
            import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        if message := describe_mistake(error):
            raise UserError(message) from error
        raise


class PackagePath(list[str]):
    """The package's ``__path__``, which answers when fairseq asks whether it is the user-dir.

    fairseq scans the modules of a user-dir that it imports itself. One that a program has imported
    before it only looks for in ``__path__``, by the path that the user gave, and then takes it for
    registered. So this knows the directory by any path to it, and registers.
    """

    def __contains__(self, path: object) -> bool:
        """Check whether a path leads to the package; if so, register its names with fairseq."""
        given = str(path)
        if not os.path.exists(given) or not any(os.path.samefile(given, place) for place in self):
            return False
        register()
        return True
