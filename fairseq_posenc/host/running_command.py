"""Records the configuration of the fairseq command that runs.

fairseq builds the model of a training and that of a checkpoint by the same call, to which it gives
the model's section alone. Only to its logger a command gives the whole configuration, before it
builds anything. So a filter keeps this object; it reads no message, and hides none that LOGLEVEL
asks for.
"""

import logging
from typing import NamedTuple

from omegaconf import DictConfig

_CLI = "fairseq_cli."
_COMMANDS = ("train", "generate", "interactive", "eval_lm")


class RunningCommand(NamedTuple):
    """A command of fairseq, and its configuration; changes of the configuration take effect."""

    name: str  # train, generate, interactive or eval_lm
    settings: DictConfig


class _SettingsRecorder(logging.Filter):
    """Keeps the configuration that a command logs; lets messages of LOGLEVEL through."""

    started: RunningCommand | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, DictConfig):
            self.started = RunningCommand(record.name.removeprefix(_CLI), record.msg)
        return record.levelno >= logging.getLogger("fairseq_cli").getEffectiveLevel()


_RECORDER = _SettingsRecorder()


def record_commands() -> None:
    """Begin to record the commands that start in this process."""
    for name in _COMMANDS:
        logger = logging.getLogger(f"{_CLI}{name}")
        logger.setLevel(logging.INFO)  # fairseq logs its configuration at this level
        logger.addFilter(_RECORDER)


def take_command() -> RunningCommand | None:
    """Return the command that has started since the last call, if any.

    So it is prepared once, for the first model that it builds.
    """
    started, _RECORDER.started = _RECORDER.started, None
    return started
