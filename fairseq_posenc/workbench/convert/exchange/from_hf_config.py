"""What a configuration of transformers means here: the options of a masked language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq import utils

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.registry import Item, Spec
from fairseq_posenc.workbench.convert.exchange.block_style import BERT, EPSILON
from fairseq_posenc.workbench.convert.exchange.config_json import ACTIVATIONS
from fairseq_posenc.workbench.convert.exchange.encoding_maps import parse_positions
from fairseq_posenc.workbench.convert.exchange.param_names import LAYOUTS

_OPTIONS = {
    "layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "ffn_embed_dim": "intermediate_size",
    "attention_heads": "num_attention_heads",
}


def settings_of(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the options of a masked language model in fairseq for a native class's configuration.

    Raises:
        UserError: another class, or settings that fairseq's RoBERTa does not have.
    """
    model = str((config.get("architectures") or [None])[0])
    known = {name: layout for name, layout in LAYOUTS.items() if layout.style is BERT}
    layout = known.get(model)
    if layout is None:
        raise UserError(
            f"{path}: a {shortened(model)}; what can be imported is {', '.join(known)}, and what "
            "fairseq-posenc export wrote"
        )
    epsilon, activation = config.get("layer_norm_eps"), config.get("hidden_act")
    if epsilon != EPSILON:
        raise UserError(
            f"{path}: layer_norm_eps is {epsilon}, and fairseq's layer norms have {EPSILON:g}: the "
            "model would compute something else"
        )
    head = layout.activations.get("masked_lm")
    if head not in (None, activation):
        raise UserError(
            f"{path}: a {model} has {head} in its head and {shortened(str(activation))} in its "
            "layers, and a RoBERTa of fairseq has one activation"
        )
    functions = {ACTIVATIONS.get(name, name): name for name in utils.get_available_activation_fns()}
    if activation not in functions:
        raise UserError(f"{path}: fairseq has no activation {shortened(str(activation))}")
    found = {f"encoder_{ours}": config.get(theirs) for ours, theirs in _OPTIONS.items()}
    sizes = (*found.values(), config.get("max_position_embeddings"), config.get("vocab_size"))
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise UserError(f"{path}: its config.json has sizes that are no numbers of 1 or more")
    spec, max_positions = _positions(model, config, path)
    return {
        "model": {
            **found,
            "_name": f"roberta_{spec.items[0].name}",
            "position_encoding": str(spec),
            "max_positions": max_positions,
            "activation_fn": functions[activation],
        },
        "task": {"_name": "masked_lm"},
    }


def _positions(model: str, config: dict[str, Any], path: Path) -> tuple[Spec, int]:
    """Return the encoding that a configuration means, and the number of positions."""
    found = parse_positions(model, config)
    if found is None:
        raise UserError(f"{path}: the positions of its {model} are none that the package has")
    return Spec.uniform((Item.canonical(found.name, dict(found.options)),)), found.max_positions
