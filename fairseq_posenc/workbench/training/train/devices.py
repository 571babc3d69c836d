"""Chooses the GPUs and nodes of a training, and divides the global batch among them."""

from __future__ import annotations

import os
import subprocess
from argparse import Namespace
from typing import NamedTuple

import torch

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.training.recipes import Recipe, largest_share


class Devices(NamedTuple):
    """The devices of a training."""

    gpus: int  # processes on each machine: its GPUs, or 1 on the processor
    nodes: int  # number of machines
    launch_options: list[str]  # of torchrun, to connect processes; empty for a single process
    mode_option: str  # of fairseq-train: `--fp16`, `--bf16` or `--cpu`

    @property
    def on_processors(self) -> bool:
        """Whether the training uses no GPU."""
        return self.mode_option == "--cpu"

    @property
    def world(self) -> int:
        """Number of processes on all machines."""
        return self.gpus * self.nodes


def choose_devices(args: Namespace, name: str) -> Devices:
    """Choose the devices by the user's options and those of the machine.

    Args:
        args: the options.
        name: name of the run, which identifies it among the machines outside Slurm.

    Raises:
        UserError: no GPU is visible, or options contradict each other.
    """
    nodes = args.nodes or int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
    mode_option = "--bf16" if args.bf16 else "--fp16"
    if args.device == "cpu":
        if args.gpus or args.fp16 or args.bf16:
            raise UserError("--device cpu excludes --gpus, --fp16 and --bf16")
        gpus, mode_option = 1, "--cpu"
    else:
        gpus = args.gpus or _count_gpus(args.dry_run)
    launch_options = ["--standalone"] if gpus > 1 else []
    if nodes > 1:
        job = os.environ.get("SLURM_JOB_ID", name)
        head = args.head or _slurm_head(nodes)
        launch_options = [f"--nnodes={nodes}", "--rdzv-backend=c10d"]
        launch_options += [f"--rdzv-endpoint={head}", f"--rdzv-id={job}"]
    return Devices(gpus, nodes, launch_options, mode_option)


def _count_gpus(dry_run: bool) -> int:
    """Count the GPUs that torch sees, which CUDA_VISIBLE_DEVICES selects; 1 for a dry run."""
    gpus = torch.cuda.device_count()
    if gpus == 0 and not dry_run:
        raise UserError("no GPU is visible; --device cpu trains on the processor, slowly")
    if gpus == 0:
        say("no GPU is visible: this is the command for one GPU (see --gpus and --device cpu)")
    return gpus or 1


def _slurm_head(nodes: int) -> str:
    """Build the address of a Slurm step: its first node, and a port from the id of the job."""
    step = os.environ.get("SLURM_STEP_NODELIST")
    if not step:
        raise UserError(f"--nodes {nodes} needs --head HOST:PORT outside Slurm")
    if os.environ.get("SLURM_STEP_NUM_TASKS") != str(nodes):
        raise UserError("start it once on each node: srun --ntasks-per-node=1 (see slurm.sh)")
    command = ["scontrol", "show", "hostnames", step]
    hosts = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.split()
    if not hosts:
        raise UserError(f"{' '.join(command)} names no host: give --head HOST:PORT")
    return f"{hosts[0]}:{20000 + int(os.environ['SLURM_JOB_ID']) % 10000}"


def share_batch(recipe: Recipe, devices: Devices, per_gpu: int | None) -> tuple[int, int]:
    """Split the global batch; return the batch per device, and the steps between updates.

    Without ``per_gpu``, the batch per device is the recipe's, or the next smaller one that divides
    the global batch.

    Raises:
        UserError: the global batch is not a multiple of the devices times ``per_gpu``.
    """
    size = per_gpu or recipe.per_gpu
    if per_gpu is None and recipe.unit == "sequences":
        size = largest_share(recipe.batch, devices.world, size) or 1
    steps, rest = divmod(recipe.batch, devices.world * size)
    if rest or not steps:
        raise UserError(
            f"a batch of {recipe.batch} {recipe.unit} cannot be made of steps of "
            f"{devices.world * size} ({devices.world} x {size}): choose --gpus or --per-gpu so "
            "that it can"
        )
    device = "processor" if devices.on_processors else "GPU"
    say(
        f"global batch: {recipe.batch} {recipe.unit} = {devices.world} {device}(s) x {size} "
        f"x {steps} steps (--update-freq)"
    )
    return size, steps
