"""An encoder as an ONNX graph, for sentences of any number and length."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.workbench.convert.exchange.config_json import (
    ARCHITECTURES,
    configuration,
    exported,
)
from fairseq_posenc.workbench.convert.exchange.hf_comparison import outputs
from fairseq_posenc.workbench.convert.exchange.modeling import configuration as settings
from fairseq_posenc.workbench.convert.exchange.modeling import heads
from fairseq_posenc.workbench.convert.exchange.modeling.stack import Stack
from fairseq_posenc.workbench.convert.random_comparison import ALLOWED, relative, sentences
from fairseq_posenc.workbench.loading.open_model import OpenModel

GRAPH = "model.onnx"
INPUTS = ("input_ids", "attention_mask")
_OUTPUTS = {"spans": ("start_logits", "end_logits"), "translation": ("last_hidden_state",)}
_EXAMPLE = (2, 5)  # of sentences and tokens; others are what a graph is compared on


class _Encoder(nn.Module):
    """A model whose inputs and outputs are tensors."""

    def __init__(self, model: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        found = self.model(input_ids, attention_mask=attention_mask)
        return tuple(found[name] for name in self.names)


def write_graph(trained: OpenModel, folder: Path) -> tuple[tuple[str, ...], float]:
    """Write a model, or the encoder of one that translates, as a graph, and compare the two.

    Returns:
        The graph's outputs, and the largest difference in parts of the largest number.

    Raises:
        UserError: a model that is no encoder, one with what ONNX has not, or the two differ.
    """
    if trained.family.name == "causal_lm":
        raise UserError(
            "--to onnx: for encoders; a causal language model writes token by token with caches, "
            "which one graph has not: --to hf makes a folder whose generate does"
        )
    names = _OUTPUTS.get(trained.head, ("logits",))
    model = _Encoder(_model(trained), names).eval()
    example = torch.full(_EXAMPLE, 4), torch.ones(_EXAMPLE, dtype=torch.long)
    sizes = {dim: torch.export.Dim.DYNAMIC for dim in (0, 1)}
    with _one_line_errors(trained):
        program: Any = torch.onnx.export(
            model,
            example,
            input_names=INPUTS,
            output_names=names,
            dynamic_shapes=dict.fromkeys(INPUTS, sizes),
            dynamo=True,
            verbose=False,
        )
        program.save(str(folder / GRAPH))
    difference = _largest_difference(trained, onnxruntime.InferenceSession(str(folder / GRAPH)))
    if difference > ALLOWED:
        raise UserError(
            f"--to onnx: the graph differs from the model by {difference:.1e} of its largest "
            f"number, and {ALLOWED:g} is rounding: nothing was written"
        )
    return names, difference


def _model(trained: OpenModel) -> nn.Module:
    """Build the model as exported folders have it; of a translation model, its encoder."""
    config, weights = configuration(trained), exported(trained)
    if trained.family.name == "translation":
        model: nn.Module = Stack(settings.StackConfig(**config["encoder_stack"]))
        start = "encoder."
        weights = {n.removeprefix(start): w for n, w in weights.items() if n.startswith(start)}
    else:
        model = getattr(heads, ARCHITECTURES[trained.head])(settings.PosencConfig(**config))
    model.load_state_dict(weights)
    return model


@contextlib.contextmanager
def _one_line_errors(trained: OpenModel) -> Iterator[None]:
    """Say in one line why a model cannot become a graph: torch fills a page."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except (torch.onnx.OnnxExporterError, RuntimeError) as error:
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        (_, stack), *_ = trained.stacks.items()
        raise UserError(
            f"--to onnx: {stack.identity.positions} cannot become a graph: "
            f"{shortened(' '.join(str(reason).split()))}"
        ) from None
    finally:
        logger.setLevel(level)


@torch.no_grad()
def _largest_difference(trained: OpenModel, session: Any) -> float:
    """Compute the largest difference on padded sentences, in parts of the largest number."""
    found = []
    for side in ("right",) if trained.head == "classes" else ("right", "left"):
        whole, *_ = sentences(trained.model, side)
        half = whole.size(1) // 2
        for tokens in (whole, whole[:2, :half] if side == "right" else whole[:2, -half:]):
            ours = _outputs(trained, tokens)
            mask = tokens.ne(next(iter(trained.stacks.values())).padding_idx)
            given = dict(zip(INPUTS, (tokens.numpy(), mask.long().numpy())))
            graph = [torch.from_numpy(each) for each in session.run(None, given)]
            theirs = torch.stack(graph, -1) if len(graph) > 1 else graph[0]
            if trained.head != "classes":
                ours, theirs = ours[mask], theirs[mask]
            found.append(relative(ours, theirs))
    return max(found)


def _outputs(trained: OpenModel, tokens: Tensor) -> Tensor:
    """Compute fairseq's numbers for a graph's: scores, or a source encoded, ``(B, T, C)``."""
    if trained.family.name != "translation":
        return outputs(trained, tokens)
    encoder = trained.model.encoder
    encoded = encoder(tokens, tokens.ne(encoder.padding_idx).sum(1))
    return encoded["encoder_out"][0].transpose(0, 1)
