"""Replaces the positions of models of Hugging Face transformers.

Importing this package lets transformers' Auto classes load the saved folders of such models: the
module ``saving`` registers a configuration class when it is imported.
"""

import importlib.util
from typing import TypeVar

from fairseq_posenc.errors import UserError

if importlib.util.find_spec("torchaudio"):  # transformers imports it, where it is installed
    try:
        importlib.import_module("torchaudio")
    except OSError as error:
        raise UserError(f"torchaudio is broken ({error}): pip uninstall torchaudio") from None

from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import PreTrainedModel

from fairseq_posenc.hf.own_positions import read_positions
from fairseq_posenc.hf.replacing import replace_positions
from fairseq_posenc.hf.saving import make_saveable
from fairseq_posenc.hf.settings import PositionSettings
from fairseq_posenc.position_parameters import LengthRule

__all__ = ["read_positions", "set_positions"]
Model = TypeVar("Model", bound=PreTrainedModel)


def set_positions(
    model: Model,
    spec: str,
    max_positions: int | None = None,
    extend: LengthRule | None = None,
    decoder_spec: str | None = None,
    directions: str = "",
    boundary_id: int | None = None,
) -> Model:
    """Give a model other positions, in place.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=100)
    >>> model = set_positions(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)), "alibi")
    >>> model.config.position_encoding
    'alibi'

    Call it before PEFT, DDP, FSDP or ``torch.compile`` wraps the model, and before an optimizer is
    created, which would lack the new parameters. The model's own positions are removed. Weights of
    positions in both the old and the new spec (a table of ``learned`` or ``shaw``, T5's buckets,
    sinks) are kept; all others are initialized. A table by distance that grows repeats its ends
    (``inkling``: zeros), so trained distances keep their rows.

    Args:
        model: a model of a supported family, with any head.
        spec: encodings, such as ``alibi``, or ``3*own+window(size=512),none``: of four layers three
            keep the model's positions (``own``) and get a window, the fourth has neither.
        max_positions: the longest sequence, and rows of tables by position; by default the model's.
        extend: how a trained table by position (``learned``, ``tupe``) becomes longer: ``copy``
            repeats its rows from the first, ``interpolate`` stretches it. By default further rows
            are untrained, and a warning says so.
        decoder_spec: encodings of an encoder-decoder's decoder; by default the encoder's.
        directions: what the first layers of an encoder see, as in ``lr,rl`` (DecBERT): ``lr`` up to
            the token, ``rl`` from the token on, ``both``; the other layers are ``both``. By default
            all are ``both``, or with ``own`` as in the model.
        boundary_id: id of the token that ends a sentence, ``</s>`` in fairseq: there ``documents``
            end, and ``sentence_learned`` counts again. By default none, with ``own`` the model's;
            without one, a call's mask or ids show its documents, and a row is one sentence.

    Returns:
        The model. ``save_pretrained`` saves its positions, too.

    Raises:
        UserError: the family, the spec or the sizes are not supported, or the model is wrapped. The
            model is then unchanged.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"{type(model).__name__} is not a transformers model (PreTrainedModel): load one by "
            "from_pretrained, and set positions before PEFT, torch.compile or DDP wraps it"
        )
    if getattr(model, "peft_config", None):
        raise UserError("set positions before adapters of PEFT, or after merge_and_unload()")
    if any(isinstance(x, (FSDPModule, FullyShardedDataParallel)) for x in model.modules()):
        raise UserError("FSDP has sharded this model: set its positions first")
    settings = PositionSettings(spec, max_positions, decoder_spec, directions, boundary_id)
    replace_positions(model, settings, extend)
    make_saveable(model)
    return model
