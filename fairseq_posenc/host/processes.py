"""Refuses trainings in several processes without a GPU that would not find each other.

fairseq assigns ranks and starts processes by the number of GPUs. Without GPUs, two processes of
torchrun both take themselves for rank 0, a process with an address waits for others forever, and
``--distributed-world-size 2 --distributed-init-method env://`` starts no process and ends with exit
code 0.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from hydra.core.hydra_config import HydraConfig

from fairseq_posenc.errors import UserError
from fairseq_posenc.host.refused_options import NO_PLASMA

_TORCHRUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")  # that torchrun sets
_TRAINING_PROGRAMS = ("fairseq-train", "train")  # fairseq's script, and its file in fairseq_cli/
_CPU_DDP_BACKENDS = ("legacy_ddp", "no_c10d")  # values of --ddp-backend; the others need a GPU


class Launch(NamedTuple):
    """fairseq's options by which processes find each other, with fairseq's defaults."""

    world_size: int = 1
    rank: int = 0
    init_method: Optional[str] = None
    no_spawn: bool = False
    backend: str = "nccl"
    ddp_backend: str = "pytorch_ddp"


def check_command_line() -> None:
    """Check the command line of this process if it runs fairseq, before it joins the others.

    Hydra's settings are checked by :mod:`~fairseq_posenc.host.log_guard`.
    """
    program = Path(sys.argv[0])
    is_script = program.name.startswith("fairseq-") and program.name != "fairseq-posenc"
    # fairseq_cli/train.py, or train.py in a checkout of fairseq.
    is_module = program.parent.name in ("fairseq_cli", "fairseq")
    if (is_script or is_module) and not HydraConfig.initialized():
        if "--use-plasma-view" in sys.argv:
            raise UserError(NO_PLASMA)  # here, as fairseq-train starts the plasma server first
        # In the other programs --distributed-world-size also counts the shards of the data.
        if program.stem in _TRAINING_PROGRAMS:
            gpus = torch.cuda.device_count()
            check_launch(parse_launch(sys.argv[1:], gpus), os.environ, gpus)


def parse_launch(arguments: Sequence[str], gpus: int) -> Launch:
    """Parse the options of :class:`Launch` from a command's arguments, and skip all others."""
    default = Launch(world_size=max(1, gpus))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add = parser.add_argument
    add("--distributed-world-size", dest="world_size", type=int)
    add("--distributed-rank", dest="rank", type=int)
    add("--distributed-init-method", dest="init_method")
    add("--distributed-no-spawn", dest="no_spawn", action="store_true")
    add("--distributed-backend", dest="backend")
    add("--ddp-backend")
    parser.set_defaults(**default._asdict())
    try:
        return Launch(**vars(parser.parse_known_args(list(arguments))[0]))
    except (argparse.ArgumentError, SystemExit):
        return default  # fairseq reports the wrong value


def check_launch(launch: Launch, environment: Mapping[str, str], gpus: int) -> None:
    """Refuse processes that would not find each other.

    Args:
        launch: the options of the command.
        environment: environment variables, with those of torchrun if it started this process.
        gpus: number of GPUs that torch sees.

    Raises:
        UserError: options are missing or wrong; the message has a command that works.
    """
    if gpus:  # fairseq assigns ranks
        refuse_training_alone(launch.world_size, environment)
        return
    started = _count_torchrun_processes(environment)
    count = max(started, launch.world_size)
    if count == 1 and launch.init_method is None:
        return
    on_slurm = {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"} & environment.keys()
    if on_slurm and not started and launch.init_method is None:
        return  # Slurm tells fairseq how to find the others
    if count == 1 and not launch.no_spawn:
        raise UserError(
            "--distributed-init-method is for several processes, and without a GPU fairseq would "
            "start none: leave it out"
        )
    is_other_rank = started > 0 and launch.rank != int(environment["RANK"])
    wrong = {
        f"--distributed-world-size {count}": launch.world_size != count,
        "--distributed-init-method env://": launch.init_method is None,
        "--distributed-no-spawn": not launch.no_spawn,
        "--distributed-backend gloo": launch.backend == "nccl",
        "--ddp-backend legacy_ddp": count > 1 and launch.ddp_backend not in _CPU_DDP_BACKENDS,
        "--distributed-rank of each process": is_other_rank,
    }
    if options := ", ".join(option for option, is_wrong in wrong.items() if is_wrong):
        raise UserError(_format_refusal(count, f"without a GPU they need {options}"))


def refuse_training_alone(world_size: int, environment: Mapping[str, str]) -> None:
    """Refuse to train alone in one of several processes that torchrun started.

    Raises:
        UserError: every process would train the same model, and write the same checkpoints.
    """
    started = _count_torchrun_processes(environment)
    if started > 1 and world_size == 1:
        problem = "with --distributed-world-size 1 each would train alone, as rank 0"
        raise UserError(_format_refusal(started, problem))


def _count_torchrun_processes(environment: Mapping[str, str]) -> int:
    """Count the processes that torchrun started, this one among them; 0 without torchrun."""
    if not all(environment.get(name, "") for name in _TORCHRUN_VARIABLES):
        return 0
    world_size, rank = environment["WORLD_SIZE"], environment["RANK"]
    return int(world_size) if world_size.isdigit() and rank.isdigit() else 0


def _format_refusal(count: int, problem: str) -> str:
    return (
        f"{count} processes of one training: {problem}. What works: torchrun --nproc_per_node "
        f'{count} --no-python sh -c \'exec fairseq-train "$@" --distributed-rank "$RANK"\' sh '
        f"DATA OPTIONS --cpu --distributed-world-size {count} --distributed-no-spawn "
        "--distributed-init-method env:// --distributed-backend gloo --ddp-backend legacy_ddp "
        "(fairseq-hydra-train: the same names below distributed_training)"
    )
