"""Positions on several axes: formulas, parity with transformers' vision models, mistakes."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.dinov3_vit import modeling_dinov3_vit
from transformers.models.pixtral import modeling_pixtral
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.sam2_video import modeling_sam2_video

from fairseq_posenc.api import Cache, SelfAttention, StackPositions
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions
from tests.helpers import oracles
from tests.test_given_positions import build, close

GRID = torch.cartesian_prod(torch.arange(3), torch.arange(4)).t()[:, None]  # (2, 1, 12)
THREE = torch.randint(0, 30, (3, 2, 9), generator=torch.Generator().manual_seed(0))
WITH_AXES = [
    *("rope(axes=2)", "rope(axes=2,pairs=alternating)", "rope(axes=2,pairs=interleaved)"),
    *("rope(sections=1/3,layout=half)", "sinusoidal(axes=2)", "learned(axes=2)", "alibi(axes=2)"),
    *("t5(axes=2)", "raffel(axes=2,max_distance=2)", "raffel(axes=2,per_head=true)"),
    *("alibi(axes=2,mode=asymmetric)", "learned(axes=2)+t5(axes=2)+sink"),
]


def rotate(spec_options: dict, ids: Tensor, x: Tensor) -> Tensor:
    """Rotate ``(B, H, T, D)`` at ids ``(axes, B, T)``."""
    rope = Rope(Dims(x.size(1) * x.size(3), x.size(1), 64), **spec_options)
    rotation = rope.rotation(ids.permute(1, 2, 0))
    assert isinstance(rotation, PairRotation)
    return rotation.rotate_queries(x)


def apply(x: Tensor, cosines: Tensor, sines: Tensor, turned: Tensor) -> Tensor:
    return x * cosines + turned * sines


def settings(rope_type: str, base: float, **others) -> SimpleNamespace:
    """Return what transformers' rotary modules read of a configuration, for heads of 128 or 32."""
    width = 128 if rope_type == "default" else 32
    parameters = {"rope_type": rope_type, "rope_theta": base, **others}
    return SimpleNamespace(rope_parameters=parameters, head_dim=width, max_position_embeddings=64)


@pytest.mark.parametrize(
    ("module", "rotary", "sections", "pairs"),
    [
        (modeling_qwen2_vl, "Qwen2VLRotaryEmbedding", [16, 24, 24], "blocks"),
        (modeling_qwen3_vl, "Qwen3VLTextRotaryEmbedding", [24, 20, 20], "interleaved"),
    ],
)
def test_sections_equal_those_of_qwen_vl(module, rotary, sections, pairs):
    x = torch.randn(2, 4, 9, 128)
    config = settings("default", 1e6, mrope_section=sections)
    cosines, sines = getattr(module, rotary)(config)(x, THREE)
    theirs, _ = module.apply_rotary_pos_emb(x, x, cosines, sines)
    options = {"base": 1e6, "layout": "half", "sections": tuple(sections), "pairs": pairs}
    torch.testing.assert_close(rotate(options, THREE, x), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rotary", "pairs"),
    [
        (modeling_qwen2_vl.Qwen2VLVisionRotaryEmbedding, "blocks"),
        (modeling_pixtral.PixtralVisionRotaryEmbedding, "alternating"),
    ],
)
def test_axial_rotations_equal_those_of_encoders_of_images(rotary, pairs):
    x = torch.randn(1, 2, 12, 32)
    cosines, sines = rotary(settings("axial", 1e4))(x, GRID[:, 0].t())  # [T, D]
    theirs = apply(x, cosines, sines, modeling_qwen2_vl.rotate_half(x))
    ours = rotate({"layout": "half", "axes": 2, "pairs": pairs}, GRID, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_axial_rotations_equal_those_of_sam2():
    config = settings("axial", 1e4)
    config.memory_attention_hidden_size = 64
    config.memory_attention_downsample_rate = 1
    config.memory_attention_num_attention_heads = 2
    x = torch.randn(1, 2, 12, 32)
    cosines, sines = modeling_sam2_video.Sam2VideoVisionRotaryEmbedding(config)(x, GRID[:, 0].t())
    theirs, _ = modeling_sam2_video.apply_rotary_pos_emb_2d(x, x, cosines, sines)
    torch.testing.assert_close(rotate({"axes": 2}, GRID, x), theirs, rtol=1e-5, atol=1e-5)


def test_axial_rotations_equal_those_of_dinov3():
    """It turns by coordinates from -1 to 1; scores depend on their differences alone."""
    config = SimpleNamespace(
        rope_theta=100.0, hidden_size=64, num_attention_heads=2, image_size=12, patch_size=3
    )
    rotary = modeling_dinov3_vit.DINOv3ViTRopePositionEmbedding(config).eval()
    cosines, sines = rotary(torch.zeros(1, 3, 9, 12))
    centers = modeling_dinov3_vit.get_patches_center_coordinates(3, 4, torch.float32, "cpu")
    ids = 2 * math.pi * (centers.t()[:, None] + 1)
    query, key = torch.randn(2, 1, 2, 12, 32)
    theirs = [apply(x, cosines, sines, modeling_dinov3_vit.rotate_half(x)) for x in (query, key)]
    ours = [rotate({"base": 100.0, "layout": "half", "axes": 2}, ids, x) for x in (query, key)]
    torch.testing.assert_close(
        ours[0] @ ours[1].transpose(2, 3),
        theirs[0] @ theirs[1].transpose(2, 3),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("pairs", ["blocks", "interleaved"])
def test_equal_positions_on_all_axes_are_those_of_text_bit_for_bit(pairs):
    x, ids = torch.randn(2, 4, 9, 16), torch.randint(0, 60, (2, 9))
    three = rotate({"sections": (4, 2, 2), "pairs": pairs}, ids.expand(3, -1, -1), x)
    assert torch.equal(three, Rope(Dims(64, 4, 64)).rotation(ids).rotate_queries(x))
    with_sections = Rope(Dims(64, 4, 64), sections=(4, 2, 2), pairs=pairs)
    assert torch.equal(three, with_sections.rotation(ids).rotate_queries(x))


IDS = torch.randint(0, 20, (2, 2, 6), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("spec", WITH_AXES)
def test_a_batch_on_two_axes_equals_each_row_alone(spec):
    positions, layer = build(spec)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, :2] = padding[1, 5:] = True
    together = layer(*positions(x, padding, position_ids=IDS))[0]
    for row in range(2):
        real = ~padding[row]
        alone = positions(x[[row]][:, real], position_ids=IDS[:, [row]][:, :, real])
        close(together[[row]][:, real], layer(*alone)[0])
    first = layer(*positions(x, padding, position_ids=IDS[0]))[0]
    equal = IDS[:1].expand(2, -1, -1)
    close(layer(*positions(x, padding, position_ids=equal))[0][~padding], first[~padding])
    swapped = layer(*positions(x, padding, position_ids=IDS.flip(0)))[0]
    moved = layer(*positions(x, padding, position_ids=IDS + torch.tensor([3, 0])[:, None, None]))[0]
    if "alibi(axes=2" not in spec:  # which tells axes from each other
        assert not torch.allclose(swapped[~padding], together[~padding])
    if "learned" not in spec and "sinusoidal" not in spec:
        torch.testing.assert_close(moved[~padding], together[~padding], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", WITH_AXES)
def test_decoding_on_two_axes_equals_the_full_pass(spec):
    positions, layer = build(spec, causal="asymmetric" not in spec)
    if not positions.dims.causal:
        return
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    full = layer(*positions(x, position_ids=IDS))[0]
    cache = Cache()
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        ids = IDS[..., start:stop]
        out = layer(*positions(x[:, start:stop], past=cache, position_ids=ids), cache)[0]
        close(out, full[:, start:stop])


@pytest.mark.parametrize("spec", ["alibi(axes=2)", "t5(axes=2)", "raffel(axes=2,max_distance=3)"])
def test_biases_of_the_axes_add_up(spec):
    positions, layer = build(spec)
    shared = positions(torch.randn(1, 6, 16).double(), position_ids=IDS[:, :1])[1]
    terms = shared[0].terms | layer.encodings.terms(shared[0].positions)
    table = next(iter([*positions.parameters(), *layer.encodings.parameters()]), None)
    for h, i, j in product(range(2), range(6), range(6)):
        expected = 0.0
        for axis in range(2):
            distance = int(IDS[axis, 0, j] - IDS[axis, 0, i])
            if spec.startswith("alibi"):
                expected -= oracles.alibi_slopes(2)[h] * abs(distance)
            elif spec.startswith("t5"):
                expected += float(table[2 * axis + h, oracles.t5_bucket(distance)].detach())
            else:
                row = max(-3, min(3, distance)) + 3
                expected += float(table[axis, row].detach()) / math.sqrt(8)
        numbers = terms.tensors()["pair_bias_numbers"]
        assert abs(float(numbers[0, h % numbers.size(1), i, j].detach()) - expected) < 1e-6


def test_vectors_of_the_axes():
    positions, _ = build("sinusoidal(axes=2)", torch.float32)
    x = torch.zeros(1, 6, 16)
    vectors = positions(x, position_ids=IDS[:, :1])[0][0]
    for i, axis, t in product(range(6), range(2), range(4)):
        angle = int(IDS[axis, 0, i]) / 10000 ** (2 * t / 8)
        assert abs(float(vectors[i, 8 * axis + 2 * t]) - math.sin(angle)) < 1e-5
        assert abs(float(vectors[i, 8 * axis + 2 * t + 1]) - math.cos(angle)) < 1e-5
    positions, _ = build("learned(axes=2)", torch.float32)
    table = positions.input["learned"].table.weight
    vectors = positions(x, position_ids=IDS[:, :1])[0][0]
    torch.testing.assert_close(vectors, table[IDS[0, 0]] + table[24 + IDS[1, 0]])
    with pytest.raises(UserError, match="position 24 is beyond the 24 positions"):
        positions(x, position_ids=torch.full((2, 1, 6), 24))
    unread = Positions.from_padding(torch.zeros(1, 1, dtype=torch.bool))  # as decoding on a GPU
    for ids in ([0, -1], [24, 0]):
        with pytest.raises(IndexError):
            positions.input["learned"].embed(unread._replace(ids=torch.tensor([[ids]])))


def test_text_before_an_image_is_on_both_axes():
    positions, layer = build("rope(sections=2/2)", causal=True)
    x, cache = torch.randn(1, 6, 16).double(), Cache()
    text, image = torch.tensor([[0, 1, 2]]), torch.tensor([[[3, 3, 3]], [[3, 4, 5]]])
    full = torch.cat([text.expand(2, 1, 3), image], 2)
    layer(*positions(x[:, :3], past=cache, position_ids=text), cache)
    out = layer(*positions(x[:, 3:], past=cache, position_ids=image), cache)[0]
    close(out, layer(*positions(x, position_ids=full))[0][:, 3:])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rope(axes=3)", r"rope\(axes=3\): 4 pairs of coordinates cannot be divided among 3 axes"),
        ("rope(sections=2/3)", "cannot be divided among 2 axes as 2/3"),
        ("rope(axes=3,sections=2/2)", "cannot be divided among 3 axes as 2/2"),
        ("rope(sections=1/3,pairs=interleaved)", "only the first section may be more"),
        ("rope(sections=1/3,pairs=alternating)", "its axes have equal parts"),
        ("rope(sections=1/x)", "expected a whole number"),
        ("sinusoidal(axes=3)", "sinusoidal needs a multiple of 6 as width, not 16"),
        ("raffel(axes=2,reset=true)", "has one axis: leave out axes or reset"),
    ],
)
def test_axes_that_mean_nothing_are_refused(spec, message):
    with pytest.raises(UserError, match=message):
        SelfAttention(StackPositions(spec, 16, 2))


def test_ids_on_other_axes_are_refused():
    x = torch.randn(2, 6, 16)
    for spec in ("rope", "rope(axes=2)+logn", "t5(axes=2)+m4", "alibi(axes=2)+chunk(size=3)"):
        with pytest.raises(UserError, match=r"are on 2 axes, and .* has 1: set its option axes"):
            StackPositions(spec, 16, 2)(x, position_ids=IDS)
    with pytest.raises(UserError, match=r"are on 2 axes, and rope\(axes=4\) has 4"):
        StackPositions("rope(axes=4)", 16, 2)(x, position_ids=IDS)
    with pytest.raises(UserError, match=r"or on several axes \(axes, 2 or 1, 6\)"):
        StackPositions("rope(axes=2)", 16, 2)(x, position_ids=IDS[..., 1:])
    window = StackPositions("rope(axes=2)+window(size=3)", 16, 2)
    assert torch.isfinite(SelfAttention(window)(*window(x, position_ids=IDS))[0]).all()
    single = StackPositions("rope", 16, 2)
    layer = SelfAttention(single)
    close(layer(*single(x, position_ids=IDS[:1]))[0], layer(*single(x, position_ids=IDS[0]))[0])
