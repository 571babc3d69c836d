"""Exports an encoder as an ONNX graph, for any number and length of sentences.

It is the graph of the code that ``--to hf`` exports; its numbers are compared with fairseq's model.
"""

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
    build_config,
    collect_weights,
)
from fairseq_posenc.workbench.convert.exchange.modeling import models
from fairseq_posenc.workbench.convert.exchange.modeling.configuration import (
    PosencConfig,
    StackConfig,
)
from fairseq_posenc.workbench.convert.exchange.modeling.stack import Stack
from fairseq_posenc.workbench.convert.random_comparison import (
    SPECIAL_SYMBOLS,
    compute_head_scores,
    draw_batches,
    largest_difference,
    refuse_difference,
)
from fairseq_posenc.workbench.loading.open_model import OpenModel

GRAPH = "model.onnx"
INPUTS = ("input_ids", "attention_mask")
_OUTPUTS = {"spans": ("start_logits", "end_logits"), "translation": ("last_hidden_state",)}
_EXAMPLE = (2, 5)  # sentences and tokens of the example; the comparison uses other sizes


class _Encoder(nn.Module):
    """Wraps a model so that its inputs and outputs are tensors."""

    def __init__(self, model: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        outputs = self.model(input_ids, attention_mask=attention_mask)
        return tuple(outputs[name] for name in self.names)


def write_graph(trained: OpenModel, folder: Path) -> tuple[tuple[str, ...], float]:
    """Write an encoder, or the encoder of a translation model, as a graph; compare the two.

    Returns:
        The names of the graph's outputs, and the largest difference, relative to the largest
        number.

    Raises:
        UserError: the model has no encoder, cannot become a graph, or differs from its graph.
    """
    if trained.family.name == "causal_lm":
        raise UserError(
            "--to onnx: for encoders; one graph has no caches, which a causal language model "
            "needs to generate: use --to hf"
        )
    names = _OUTPUTS.get(trained.head, ("logits",))
    model = _Encoder(_build_model(trained), names).eval()
    example = torch.full(_EXAMPLE, SPECIAL_SYMBOLS), torch.ones(_EXAMPLE, dtype=torch.long)
    sizes = {dim: torch.export.Dim.DYNAMIC for dim in (0, 1)}
    with _shorten_errors(trained):
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
    difference = _compare_graph(trained, onnxruntime.InferenceSession(str(folder / GRAPH)))
    refuse_difference("--to onnx: the graph differs from the model", difference)
    return names, difference


def _build_model(trained: OpenModel) -> nn.Module:
    """Build the exported version of the model; for translation, only of its encoder."""
    config, weights = build_config(trained), collect_weights(trained)
    if trained.translates:
        model: nn.Module = Stack(StackConfig(**config["encoder_stack"]))
        encoder_weights = [(name, x) for name, x in weights.items() if name.startswith("encoder.")]
        weights = {name.removeprefix("encoder."): x for name, x in encoder_weights}
    else:
        model = getattr(models, ARCHITECTURES[trained.head])(PosencConfig(**config))
    model.load_state_dict(weights)
    return model


@contextlib.contextmanager
def _shorten_errors(trained: OpenModel) -> Iterator[None]:
    """Convert torch's long error about a model that cannot become a graph to one line."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except (torch.onnx.OnnxExporterError, RuntimeError) as error:
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        positions = next(iter(trained.stacks.values())).identity.positions
        raise UserError(
            f"--to onnx: {positions} cannot become a graph: "
            f"{shortened(' '.join(str(reason).split()))}"
        ) from None
    finally:
        logger.setLevel(level)


def _compare_graph(trained: OpenModel, session: Any) -> float:
    """Compute the largest difference on padded sentences, relative to the largest number."""
    padding = next(iter(trained.stacks.values())).padding_idx

    def compute_ours(tokens: Tensor) -> Tensor:
        if not trained.translates:
            return compute_head_scores(trained, tokens)
        encoded = trained.model.encoder(tokens, tokens.ne(padding).sum(1))
        return encoded["encoder_out"][0].transpose(0, 1)  # [B, T, C]

    def compute_theirs(tokens: Tensor) -> Tensor:
        arrays = (tokens.numpy(), tokens.ne(padding).long().numpy())
        outputs = [torch.from_numpy(x) for x in session.run(None, dict(zip(INPUTS, arrays)))]
        return torch.stack(outputs, -1) if len(outputs) > 1 else outputs[0]

    right, left = (tokens[0] for tokens in draw_batches(trained.model))  # of the encoder
    half = right.size(1) // 2
    batches = [[right], [right[:2, :half]], [left], [left[:2, -half:]]]
    if trained.head == "classes":  # scores of a sentence, from its first token
        return largest_difference(batches[:2], compute_ours, compute_theirs, by_token=False)
    return largest_difference(batches, compute_ours, compute_theirs)
