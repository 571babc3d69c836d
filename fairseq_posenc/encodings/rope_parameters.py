"""Converts ``rope_parameters`` of a transformers configuration to ``rope(...)`` of a spec."""

from collections.abc import Mapping
from typing import Any

from fairseq_posenc.encodings.rope_scaling import KINDS, TRAINED_LENGTH, Ntk
from fairseq_posenc.errors import UserError, shortened


def read_rope(parameters: Mapping[str, Any], max_positions: int, layout: str) -> str:
    """Convert the parameters to a spec: ``rope(base=10000.0,layout=half,scaling=yarn:4)``.

    Args:
        parameters: ``rope_theta``, ``partial_rotary_factor``, ``rope_type`` and the settings of
            that type, as in ``rope_parameters`` of transformers 5.
        max_positions: ``max_position_embeddings``, from which missing lengths are taken.
        layout: how pairs are formed, see :class:`~fairseq_posenc.encodings.rope.Rope`.
    """
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"  # `type`: older
    if "mrope_section" in parameters or rope_type == "mrope":
        raise UserError(
            "rotations along several axes (M-RoPE) are not read from a configuration: name them, "
            "as in rope(axes=3,sections=16/24/24)"
        )
    options = {"base": parameters.get("rope_theta", 10000.0), "layout": layout}
    if rope_type != "proportional":  # there the fraction is a setting of the scaling
        options["fraction"] = parameters.get("partial_rotary_factor", 1.0)
    if rope_type != "default":
        options["scaling"] = _read_scaling(rope_type, parameters, max_positions)
    return f"rope({','.join(f'{name}={value}' for name, value in options.items())})"


def _read_scaling(rope_type: str, parameters: Mapping[str, Any], max_positions: int) -> str:
    """Convert a scaling to the form of specs, such as ``yarn:4:beta_fast=16``."""
    if rope_type == "dynamic" and parameters.get("alpha"):  # HunYuan's form of `ntk`
        return f"{Ntk.kind}:{parameters['alpha']}"
    # transformers has no `ntk`, but writes it as another rope_theta.
    if rope_type not in KINDS or KINDS[rope_type] is Ntk:
        known = ", ".join(name for name in KINDS if name != Ntk.kind)
        raise UserError(f"unknown scaling {shortened(repr(rope_type))} of rope; known: {known}")
    length = parameters.get(TRAINED_LENGTH) or max_positions
    # For these two kinds, transformers computes a missing factor from the lengths.
    default = max(max_positions / length, 1.0) if rope_type in ("yarn", "longrope") else 1.0
    written = [rope_type, str(parameters.get("factor") or default)]
    # The factor is written; the length of `dynamic` is the model's, which is the default.
    skipped = {"factor", "max_position_embeddings"}
    if length == max_positions:
        skipped.add(TRAINED_LENGTH)
    if not (parameters.get("mscale") and parameters.get("mscale_all_dim")):
        skipped |= {"mscale", "mscale_all_dim"}  # transformers uses both or none
    for name, hf_name in KINDS[rope_type].hf_names().items():
        value = parameters.get(hf_name)
        if value is not None and hf_name not in skipped:
            written.append(f"{name}={_format(value)}")
    return ":".join(written)


def _format(value: Any) -> str:
    """Format a setting of a scaling as specs write it."""
    return "/".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value).lower()
