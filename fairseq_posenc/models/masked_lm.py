"""Defines the masked LMs: fairseq's RoBERTa with chosen position encodings and directions.

``--arch roberta_alibi`` has fairseq's base size and ALiBi; the suffixes ``_large`` and ``_tiny``
mean other sizes.
"""

import logging
from argparse import ArgumentParser
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta import RobertaEncoder, RobertaModel
from fairseq.models.roberta.model import base_architecture, roberta_large_architecture
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from omegaconf import OmegaConf, open_dict
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc import registry
from fairseq_posenc.host.preparation import CheckedModel, prepare_model
from fairseq_posenc.models.architectures import make_architecture
from fairseq_posenc.transformer.options import add_position_args, configure_stack
from fairseq_posenc.transformer.stacks import PositionalEncoder
from fairseq_posenc.user_dir import DECBERT

logger = logging.getLogger(__name__)


class PositionalRobertaEncoder(RobertaEncoder):
    """fairseq's RoBERTa encoder with a :class:`PositionalEncoder` as its stack of layers."""

    def build_encoder(
        self, args: Any, dictionary: Any, embed_tokens: nn.Embedding
    ) -> PositionalEncoder:
        """Build the stack with BERT's initialization, of linear layers and embeddings."""
        encoder = PositionalEncoder(configure_stack(args, "encoder"), dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder


class SpanHead(nn.Module):
    """A linear layer with two outputs per token, as in BERT (Devlin et al., 2019, section 4.2)."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.scores = nn.Linear(embed_dim, 2)

    def forward(self, features: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Score each token as the first and as the last of an answer, ``[B, T]`` each in float32.

        Args:
            features: ``[B, T, C]``, of any precision.
            padding: ``[B, T]``, true for padding, whose scores become -inf.
        """
        weight, bias = self.scores.weight.float(), self.scores.bias.float()
        scores = F.linear(features.float(), weight, bias)  # [B, T, 2]
        scores = scores.masked_fill(padding.unsqueeze(-1), float("-inf"))
        return scores[..., 0], scores[..., 1]


@register_model("positional_roberta")
class PositionalRoberta(CheckedModel, RobertaModel):
    """fairseq's RoBERTa with chosen positions and directions; its checkpoints are checked."""

    def __init__(self, args: Any, encoder: PositionalRobertaEncoder) -> None:
        super().__init__(args, encoder)
        # Not among the classification heads, in which fairseq expects `dense` and `out_proj`.
        self.span_head: SpanHead | None = None

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        """Add RoBERTa's options, ours, and activation checkpointing, which RoBERTa lacks."""
        RobertaModel.add_args(parser)
        add_position_args(parser)
        text = "recompute each layer in the backward pass to save memory"
        parser.add_argument("--checkpoint-activations", action="store_true", help=text)
        text = "move checkpointed activations to the CPU"
        parser.add_argument("--offload-activations", action="store_true", help=text)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "PositionalRoberta":
        """Build a model as fairseq's class does, with our encoder; let its task renew the masks."""
        # In hydra's configuration, options can be added only inside `open_dict`.
        with open_dict(args) if OmegaConf.is_config(args) else nullcontext():
            if getattr(args, "max_positions", None) is None:
                args.max_positions = getattr(args, "tokens_per_sample", 0) or task.max_positions()
            if getattr(args, "offload_activations", False):
                args.checkpoint_activations = True  # offloading implies checkpointing
            encoder = PositionalRobertaEncoder(args, task.source_dictionary)
        settings: Any = getattr(task, "cfg", None)
        if OmegaConf.is_config(settings):
            # Persistent workers would keep the masks of their first epoch; the task is fairseq's.
            with open_dict(settings):
                settings.update(reuse_dataloader=False, persistent_workers=False)
        model = cls(args, encoder)
        prepare_model(model, task, encoder=encoder.sentence_encoder)  # with checks of the data
        return model

    def register_classification_head(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Add a classification head, and record its activation in checkpoints."""
        super().register_classification_head(name, *args, **kwargs)
        model: Any = self  # torch types its parts as tensors or modules
        model.encoder.sentence_encoder.record(pooler=model.args.pooler_activation_fn)

    def register_span_head(self) -> None:
        """Add the head that the task squad trains: it scores where an answer begins and ends."""
        args: Any = self.args  # torch types it as a tensor or a module
        self.span_head = SpanHead(args.encoder_embed_dim)
        self.span_head.apply(init_bert_params)

    def forward(
        self,
        src_tokens: Tensor,
        *args: Any,
        span_scores: bool = False,
        position_ids: Tensor | None = None,
        target_tokens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run fairseq's RoBERTa on tokens ``[B, T]``, or compute the scores of the span head.

        By default tokens are counted; ``position_ids``, ``[B or 1, T]``, are other positions. With
        ``span_scores`` the result is the scores of each token as the first and as the last of an
        answer, each ``[B, T]`` in float32. ``target_tokens``, of ``--include-target-tokens``, are
        the masked tokens, and padding elsewhere: a masked ``</s>`` still ends its sentence.
        """
        if target_tokens is not None or position_ids is not None:
            stack: Any = self.encoder.sentence_encoder  # type: ignore[union-attr]
            with_ends = src_tokens  # with the ends of all sentences
            if target_tokens is not None:
                with_ends = src_tokens.masked_fill(target_tokens.eq(stack.eos_idx), stack.eos_idx)
            # The call below leaves out both arguments: the stack uses what is set here.
            with stack.at_positions(with_ends, position_ids):
                return self(src_tokens, *args, span_scores=span_scores, **kwargs)
        if not span_scores:
            return super().forward(src_tokens, *args, **kwargs)
        assert self.span_head is not None, "register_span_head() first"
        states, _ = super().forward(src_tokens, *args, features_only=True, **kwargs)  # [B, T, C]
        encoder: Any = self.encoder
        return self.span_head(states, src_tokens.eq(encoder.dictionary.pad()))

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Add a span head to a checkpoint that lacks it, or drop the one that the model lacks."""
        super().upgrade_state_dict_named(state_dict, name)
        prefix = f"{name}.span_head." if name else "span_head."
        head = {} if self.span_head is None else self.span_head.state_dict(prefix=prefix)
        for key in [key for key in state_dict if key.startswith(prefix) and key not in head]:
            logger.info("%s of the checkpoint is ignored: the model has no span head", key)
            del state_dict[key]
        for key in [key for key in head if key not in state_dict]:
            logger.info("%s starts fresh: the checkpoint has no span head", key)
            state_dict[key] = head[key]


_SIZES = {
    "": base_architecture,
    "_large": roberta_large_architecture,
    "_tiny": make_architecture(
        base_architecture,
        encoder_layers=2,
        encoder_embed_dim=128,
        encoder_ffn_embed_dim=512,
        encoder_attention_heads=4,
    ),
}


def _register(name: str, spec: str, directions: str = "", sizes: Iterable[str] = _SIZES) -> None:
    """Register an architecture in several sizes, named by the suffixes in ``_SIZES``."""
    for suffix in sizes:
        architecture = make_architecture(
            _SIZES[suffix], position_encoding=spec, attention_directions=directions
        )
        register_model_architecture("positional_roberta", f"{name}{suffix}")(architecture)


for _encoding in registry.names(encoder=True):
    _register(f"roberta_{_encoding}", _encoding)
# The hybrids of the M4M paper (arXiv:2109.12788, table 2).
_register("roberta_learned_m4m", "learned+m4m")
_register("roberta_m4_reset", "m4+reset")
# As in ModernBERT (arXiv:2412.13663), every third layer sees all tokens, the others a window.
_MODERN = "rope(base=160000,layout=half),2*rope(layout=half)+window(size=128)"
_register("roberta_modern", _MODERN, sizes=("", "_large"))  # not "_tiny", with only two layers
for _name, _directions in DECBERT.items():  # the directions of the first layers, such as "lr,rl"
    _register(_name, "learned", _directions)
    _register(f"{_name}_nope", "none", _directions)  # NoPE: no positions
