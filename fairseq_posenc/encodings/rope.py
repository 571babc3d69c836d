"""Rotary position embedding, and its variants with trained frequencies and with decay (xPos).

B batch, H heads, T tokens, D head size; in formulas d head size (in frequencies its rotated part),
n the number of positions, L the trained length, c another encoding's ``scale_factor``, or 1.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.rope_scaling import (
    KINDS,
    TRAINED_LENGTH,
    HFParameters,
    Linear,
    Ntk,
    Scaling,
)
from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.option_values import format_value
from fairseq_posenc.positions import reading_waits
from fairseq_posenc.precision import at_least_fp32

GAMMA = 0.4  # xPos: g in the equation
_OPTIONS_OF_ROPE_ALONE = ("cross_attention", "axes", "sections", "pairs")  # refused in subclasses


@register("rope")
class Rope(Encoding):
    """Queries and keys are rotated by their position, pair by pair of their coordinates.

    Equation:
        e_ij = (R_i q_i).(R_j k_j) / sqrt(c d), where R_i turns the pair (2t, 2t+1) of coordinates
        by the angle i * base^(-2t/d); so the score depends on j - i.
    Shapes:
        rotates query and key ``(B, H, T, D)``; one rotation for all layers.
    Parameters:
        0
    Source:
        Su et al. (2021), "RoFormer", arXiv:2104.09864, section 3.2.2. ``layout=half`` pairs
        coordinate t with t + d/2, as GPT-NeoX and LLaMA do. Scalings, of factor F:
        ``linear`` Chen et al. (2023), arXiv:2306.15595; ``ntk`` raises the base by F^(d/(d-2)),
        ``dynamic`` by (F n/L - F + 1)^(d/(d-2)); ``yarn`` Peng et al. (2023), arXiv:2309.00071;
        ``llama3`` Llama 3.1; ``longrope`` Ding et al. (2024), arXiv:2402.13753; ``proportional``
        Barbero et al. (2024), arXiv:2410.06205.
    Differs:
        the length n of ``dynamic`` and ``longrope`` is the model's number of positions, so that
        decoding equals the full pass (in transformers' models, the batch's longest row).
        ``fraction`` rotates only the first part of each head; ``cross_attention`` also rotates, in
        a translation model's decoder, queries by their target position and the source's keys by
        theirs. On several ``axes``, a pair turns by the position on its axis. By default the axes
        have equal parts, each with all frequencies (Qwen2-VL's encoder, SAM 2, DINOv3). With
        ``sections``, the number of pairs of each axis, the axes share one range of frequencies
        (M-RoPE of Qwen2-VL, arXiv:2409.12191); with ``pairs=interleaved`` they take turns in it
        (Qwen3-VL). With ``pairs=alternating`` they take turns, too, and the pairs of an axis are
        neighbors (Pixtral, arXiv:2410.07073). Text has equal positions on all axes.
    """

    acts_on = "rotation"
    takes_real_ids = True  # positions may be numbers such as 0.5
    shared_by_layers = True  # one module, called once in a pass

    def __init__(
        self,
        dims: Dims,
        *,
        base: float = 10000.0,
        fraction: float = 1.0,
        layout: Literal["interleaved", "half"] = "interleaved",
        scaling: Scaling | None = None,
        cross_attention: bool = False,  # a decoder's layers read it in the spec, so it is not kept
        axes: int | None = None,
        sections: tuple[int, ...] | None = None,  # pairs of each axis, written 16/24/24
        pairs: Literal["blocks", "interleaved", "alternating"] = "blocks",
    ) -> None:
        super().__init__(dims)
        self.rotated = int(fraction * dims.head_dim)
        if self.rotated < 2 or self.rotated % 2 or self.rotated > dims.head_dim:
            raise UserError(
                f"{self.name} rotates pairs, but {fraction:g} of a head of size {dims.head_dim} is "
                f"{self.rotated} coordinates: the number must be even, from 2 to {dims.head_dim}"
            )
        if base <= 1:
            raise UserError(f"{self.name}(base={base:g}): the base must be more than 1")
        self.layout = layout
        self.base = base
        self.scaling = scaling
        self.sections = sections
        self.pairs = pairs
        self.axes = axes or (len(sections) if sections else 1)
        if sections is not None and pairs == "alternating":
            raise UserError(f"{self.name}(pairs=alternating): its axes have equal parts")
        self.pair_axes = torch.tensor(self._assign_axes(), device="cpu")  # "meta" has no values
        self.compute_constants()

    def _assign_axes(self) -> list[int]:
        """Assign an axis, a number from 0, to each pair of coordinates.

        The pairs of an axis are neighbors, or the axes take turns until their sections are full,
        and the first axis gets the remaining pairs, as in Qwen3-VL: 4/2/2 gives 0 1 2 0 1 2 0 0.

        Raises:
            UserError: the pairs cannot be divided in this way.
        """
        total, axes = self.rotated // 2, self.axes  # numbers of pairs and of axes
        sections = self.sections or (total // axes,) * axes
        written = format_value(sections)
        if len(sections) != axes or sum(sections) != total:
            raise UserError(
                f"{self.name}(axes={axes}): {total} pairs of coordinates cannot be divided among "
                f"{axes} axes as {written}; give the pairs of each axis, such as sections=16/24/24"
            )
        if self.pairs != "interleaved":
            return [axis for axis, section in enumerate(sections) for _ in range(section)]
        # The axes take pairs in turn; what a full axis would take is given to the first one.
        assigned = [t % axes if t // axes < sections[t % axes] else 0 for t in range(total)]
        if any(assigned.count(axis) < section for axis, section in enumerate(sections)):
            raise UserError(
                f"{self.name}(sections={written},pairs=interleaved): only the first section may "
                "be more than an equal part"
            )
        return assigned

    def rotation(self, ids: Tensor) -> PairRotation:
        """Compute the rotation at positions ``ids``, ``(B or 1, T)``, in float32.

        Positions on several axes are ``(B or 1, T, axes)``; a token with one number has it on all.
        """
        frequencies = self.angles_per_position().to(ids.device, non_blocking=True)
        pair_axes = self.pair_axes.to(ids.device, non_blocking=True)  # if not moved before
        ids = ids[..., pair_axes] if ids.dim() == 3 else ids[..., None]
        angles = ids[:, None] * frequencies  # [B or 1, 1, T, rotated/2]
        phases = torch.complex(self.gain * angles.cos(), self.gain * angles.sin())
        return PairRotation(phases, half=self.layout == "half")

    def angles_per_position(self) -> Tensor:
        """Return each pair's angle per position, ``(rotated / 2,)``; ``lerope`` overrides it."""
        return self.frequencies

    def compute_constants(self) -> None:
        """Compute frequencies and gain, again for other lengths, which some scalings read."""
        scaling = self.scaling or Linear(1.0)  # which changes nothing
        each_axis_has_all = self.pairs == "blocks" and self.sections is None
        # The number of coordinates over which frequencies fall from 1 to 1 / base.
        width = self.rotated // self.axes if each_axis_has_all else self.rotated
        self.gain = scaling.gain(self.dims)  # a factor of cosines and sines, for most kinds 1
        # Each pair's angle per position, `(rotated / 2,)`: no buffer, which `half()` would round.
        self.frequencies = scaling.frequencies(self.base, width, self.dims)
        if each_axis_has_all:
            self.frequencies = self.frequencies.repeat(self.axes)
        elif self.pairs == "alternating":  # axis a has the frequencies a, a + axes, ...
            self.frequencies = self.frequencies.view(-1, self.axes).t().flatten()


@register("lerope")
class LeRope(Rope):
    """As ``rope``, but the frequency of each pair of coordinates is trained.

    Equation:
        e_ij = (R_i q_i).(R_j k_j) / sqrt(c d), where R_i turns pair t of coordinates by the angle
        i * w_t * exp(a_t), w_t is the frequency of ``rope``, base^(-2t/d), and a_t is trained.
    Shapes:
        a ``(d/2,)``, a number for each pair, once for all layers; it starts at 0: ``rope``.
    Parameters:
        d/2
    Source:
        Mistral Large 4 (2026), "LeRoPE", ``alpha`` of ``MistralLarge4TextRotaryEmbedding`` in
        Hugging Face's transformers, where w has ``scaling=yarn:2048:length=512:attention_factor=1``
        and every fourth layer no positions.
    Differs:
        nothing. a stays in float32 in models of 16 bits, as theirs does.
    """

    without_options = _OPTIONS_OF_ROPE_ALONE  # which specs refuse
    zeros = ("alpha",)  # parameters that start at 0, which is `rope`

    def __init__(self, dims: Dims, **others: Any) -> None:
        super().__init__(dims, **others)  # the options of `Rope`
        self.alpha = nn.Parameter(torch.empty(self.rotated // 2, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LeRope":
        """Keep ``alpha`` in float32 in models of 16 bits, as Mistral does.

        Rounded to bfloat16, angles at a distance of 1,000 tokens would be wrong by about 1.
        """

        def keep_float32(x: Tensor) -> Tensor:
            moved = fn(x)
            return moved if moved.element_size() >= 4 else x.to(moved.device, torch.float32)

        super()._apply(keep_float32, recurse)
        return self

    def angles_per_position(self) -> Tensor:
        """Multiply the frequencies by the trained factors, ``(rotated / 2,)``."""
        return super().angles_per_position().to(self.alpha.device) * at_least_fp32(self.alpha).exp()


@register("xpos")
class XPos(Rope):
    """As ``rope``, but scores decay with the distance, faster in pairs that turn faster.

    Equation:
        e_ij = (z^(i/w) R_i q_i).(z^(-j/w) R_j k_j) / sqrt(c d), where pair t of coordinates has
        z = (2t/d + g) / (1 + g), below 1: the score decays with i - j.
    Shapes:
        rotates query and key ``(B, H, T, D)``; one rotation for all layers.
    Parameters:
        0
    Source:
        Sun et al. (2022), "A Length-Extrapolatable Transformer", arXiv:2212.10554; g = 0.4 and
        w = ``scale_base`` = 512 as in the authors' code.
    Differs:
        for causal models only, as in the paper: a later key would be amplified. Exponents count
        from half of the trained length, to suit fp16; scores do not change.
    """

    causal_reason = "it would amplify keys after the query"  # not empty: refused in encoders
    without_options = _OPTIONS_OF_ROPE_ALONE  # which specs refuse

    def __init__(self, dims: Dims, *, scale_base: float = 512.0, **others: Any) -> None:
        super().__init__(dims, **others)  # the options of `Rope`
        self.scale_base = scale_base

    def rotation(self, ids: Tensor) -> PairRotation:
        """Compute the rotation, and its decay, at positions ``ids``, ``(B or 1, T)``."""
        bits = self._log2_of_largest_factor(ids)  # `rotate_queries` refuses types that hold less
        return super().rotation(ids)._replace(decay=self.decay(ids), decay_bits=bits)

    def _log2_of_largest_factor(self, ids: Tensor) -> float:
        """Compute :attr:`PairRotation.decay_bits`; 0 if the positions are not known.

        Factors are largest at the ends, where the exponent is farthest from 0: at position 2,047,
        with L = 512, w = 512 and g = 0.4, (1.4 / 0.4)^(1791 / 512), or 2^6.3.
        """
        if torch.compiler.is_compiling() or not ids.numel():
            return 0.0
        if not reading_waits(ids.device):
            first, last = torch.stack(ids.aminmax()).tolist()
        elif ids.size(1) > 1:  # a full pass, assumed to count from 0, so that a GPU is not read
            first, last = 0, ids.size(1) - 1
        else:  # a step of decoding, at a position that is not known
            return 0.0
        middle = self.dims.trained_length // 2
        return max(middle - first, last - middle) / self.scale_base * math.log2((1 + GAMMA) / GAMMA)

    def decay(self, ids: Tensor) -> Tensor:
        """Compute the factor of each coordinate of a query, ``(B or 1, 1, T, D)``."""
        evens = torch.arange(0, self.rotated, 2, dtype=torch.float32, device=ids.device)  # 2t
        z = (evens / self.rotated + GAMMA) / (1 + GAMMA)  # one for each pair
        exponents = ids[..., None] - self.dims.trained_length // 2  # [B or 1, T, 1]
        factors = z ** (exponents.float() / self.scale_base)  # [B or 1, T, rotated/2]
        # Both coordinates of a pair have its factor.
        factors = torch.stack([factors, factors], -2 if self.layout == "half" else -1).flatten(-2)
        return F.pad(factors, (0, self.dims.head_dim - self.rotated), value=1.0).unsqueeze(1)


def read_rope(
    parameters: HFParameters, max_positions: int, layout: str, pairs: str | None = None
) -> str:
    """Convert transformers' settings to a spec, as ``rope(base=10000.0,layout=half,fraction=1.0)``.

    Args:
        parameters: ``rope_theta``, ``partial_rotary_factor``, ``rope_type`` and the settings of
            that type, as in ``rope_parameters`` of transformers 5.
        max_positions: ``max_position_embeddings``, from which missing lengths are taken.
        layout: the option ``layout`` of :class:`Rope`.
        pairs: its option ``pairs``, for M-RoPE of a known form; no setting of transformers says it.
    """
    # `type` is the older name. Qwen2-VL's files have `mrope`, which its class makes `default`.
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if "mrope_section" in parameters and pairs is None:
        raise UserError("unknown M-RoPE of this model: write it, such as rope(sections=16/24/24)")
    options = {"base": parameters.get("rope_theta", 10000.0), "layout": layout}
    if rope_type != "proportional":  # there the fraction is a setting of the scaling
        options["fraction"] = parameters.get("partial_rotary_factor", 1.0)
    if pairs is not None:
        options["sections"] = format_value(parameters["mrope_section"])
        options["pairs"] = pairs
    if rope_type != "default":
        options["scaling"] = _read_scaling(rope_type, parameters, max_positions)
    return f"rope({','.join(f'{name}={value}' for name, value in options.items())})"


def write_rope(options: Mapping[str, Any], dims: Dims, share: float) -> HFParameters:
    """Convert all options of ``rope`` to transformers' settings, which lack layout and pairs.

    transformers has no ``ntk``, only its base. Our ``fraction`` is a part of the widest heads, and
    theirs of the layer's own heads, whose width is ``share`` times the widest.
    """
    base, scaling = options["base"], options["scaling"]
    if type(scaling) is Ntk:  # not its subclass `Dynamic`, which transformers has
        width = int(options["fraction"] * dims.head_dim)
        base, scaling = scaling.scaled_base(base, width, dims), None
    written = {"rope_type": "default", "partial_rotary_factor": options["fraction"] / share}
    if options["sections"]:
        written["mrope_section"] = list(options["sections"])
    # `to_hf` of `proportional` has a fraction of its own, which replaces ours.
    return {**written, **(scaling.to_hf(dims) if scaling else {}), "rope_theta": base}


def _read_scaling(rope_type: str, parameters: HFParameters, max_positions: int) -> str:
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
    skipped = {"factor"}  # which is written already
    if rope_type == "dynamic" or length == max_positions:
        skipped.add("length")  # the model's, which is the default
    if not (parameters.get("mscale") and parameters.get("mscale_all_dim")):
        skipped |= {"mscale", "mscale_all_dim"}  # transformers uses both or none
    for name, hf_name in KINDS[rope_type].hf_names().items():
        value = parameters.get(hf_name)
        if value is not None and name not in skipped:
            written.append(f"{name}={format_value(value)}")
    return ":".join(written)
