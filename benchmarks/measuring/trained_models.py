"""Helps scripts on trained models of transformers: short trainings, and facts for records."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from fairseq_posenc.files import written_whole
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.results.record import Record, Row
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.folders import lock_folder
from fairseq_posenc.workbench.running.jobs import Inputs, Outputs, Step
from fairseq_posenc.workbench.running.progress import say
from measuring.timing import clock

# The argument that takes a cache; transformers has renamed it.
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
STATE = "state.pt"  # holds the state of a training, in its folder
# Updates in which the learning rate rises; it then stays, so that a training can be prolonged.
WARM_UP = 10
MAX_GRADIENT_NORM = 1.0


def versions() -> dict[str, str]:
    """Return the versions of the packages that the results depend on, for a record."""
    return {
        "fairseq_posenc": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


@cache
def checksum_weights(folder: Path) -> list[str]:
    """Compute the checksums of the files that hold a model's weights."""
    paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    return [checksum(path) for path in paths]


def train_all(
    args: Namespace,
    train: Callable[[Namespace, str, Path], Outputs],
    collect_inputs: Callable[[Namespace, str], Inputs],
    build_record: Callable[[Namespace, dict[str, Outputs]], Record],
) -> Record:
    """Train a model for each of ``--specs``, and write the record after each training.

    ``train`` gets ``args``, a spec and a folder beside the record. Finished trainings are not
    repeated; if ``--updates`` has grown, they continue, so ``collect_inputs`` lists all other
    options that a training depends on. ``build_record`` gets the trainings so far, by spec.
    """

    def do_step(spec: str) -> Outputs:
        folder = args.out.with_suffix("") / name_folder(spec)
        inputs = collect_inputs(args, spec)
        has_state = (folder / STATE).exists
        step = Step(folder, inputs, lambda _: train(args, spec, folder), args.updates, has_state)
        return step.do()

    outputs: dict[str, Outputs] = {}
    with lock_folder(args.out.with_suffix("")):
        for spec in args.specs:
            outputs[spec] = do_step(spec)
            record = build_record(args, outputs)
            record.write(args.out)
    return record


def name_folder(spec: str) -> str:
    """Name a folder after a spec, in letters that need no quoting in a shell."""
    return re.sub(r"[^\w.+=]+", "-", spec).strip("-")


class Training:
    """A model in training, its optimizer and its figures so far, saved in a folder.

    Args:
        model: on its device; AdamW trains all of it, without weight decay.
        lr: learning rate after the warm-up.
        folder: folder of the state; a training that was interrupted continues from it.
    """

    def __init__(self, model: PreTrainedModel, lr: float, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.updates = 0
        self.losses: list[float] = []  # of the batch of each update, before the update
        self.evaluations: list[Row] = []
        self.seconds = 0.0  # of all updates; see `timing.clock`
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda update: min(1.0, (update + 1) / WARM_UP)
        )
        if (folder / STATE).exists():
            self._load()

    def run(
        self,
        goal: int,
        every: int,
        compute_loss: Callable[[int], Tensor],
        evaluate: Callable[[], Row],
    ) -> None:
        """Train up to a number of updates; evaluate and save before the first and at intervals.

        Args:
            goal: total number of updates, those made earlier included.
            every: updates between two evaluations.
            compute_loss: reads the batch of an update, by its number from 0.
            evaluate: measures the model, in evaluation mode and without gradients.
        """
        now = clock(self.model.device)
        while True:
            if self.updates % every == 0 or self.updates == goal:
                self._evaluate_and_save(evaluate)
            if self.updates >= goal:
                return
            began = now()
            self.model.train()
            loss = compute_loss(self.updates)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
            self.seconds += now() - began
            self.losses.append(loss.item())
            self.updates += 1

    def _evaluate_and_save(self, evaluate: Callable[[], Row]) -> None:
        """Evaluate and save, unless the state was loaded after this update's evaluation."""
        if any(row["updates"] == self.updates for row in self.evaluations):
            return
        self.model.eval()
        with torch.no_grad():
            row: Row = {"updates": self.updates, **evaluate()}
        self.evaluations.append(row)
        say(f"{self.folder.name}: {row}")
        self._save()

    def _save(self) -> None:
        content = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "evaluations": self.evaluations,
            "losses": self.losses,
            "seconds": self.seconds,
        }
        with written_whole(self.folder / STATE) as new:
            torch.save(content, new)

    def _load(self) -> None:
        content: dict[str, Any] = torch.load(self.folder / STATE, weights_only=True)
        self.model.load_state_dict(content["model"])
        self._optimizer.load_state_dict(content["optimizer"])
        self._schedule.load_state_dict(content["schedule"])
        self.evaluations = content["evaluations"]
        self.losses = content["losses"]
        self.seconds = content["seconds"]
        self.updates = len(self.losses)
