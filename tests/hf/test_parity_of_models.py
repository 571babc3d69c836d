"""Encodings of single models equal the code of these models in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.models.inkling import modeling_inkling
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.mistral_large4 import modeling_mistral_large4 as mistral
from transformers.models.mistral_large4.configuration_mistral_large4 import MistralLarge4TextConfig

from fairseq_posenc.api import PositionEncoding
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.planner import BACKENDS
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope import LeRope
from fairseq_posenc.encodings.rope_scaling import Scaling
from fairseq_posenc.encodings.softmax import Ssmax
from fairseq_posenc.mask import Mask
from tests.helpers.terms import terms_of

WIDTH, HEADS, LENGTH, RANK, EXTENT, FLOOR = 24, 3, 13, 4, 6, 5
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def attend_by_inkling(captured: dict[str, Any]) -> tuple[Any, Tensor]:
    """Run a layer of Inkling, noting its queries and keys; return its attention and input."""

    def capture(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **named: Any):
        captured.update(query=query, key=key, value=value, scaling=named["scaling"])
        attended, weights = modeling_inkling.eager_attention_forward(
            module, query, key, value, mask, **named
        )
        captured["attended"] = attended.transpose(1, 2)
        return attended, weights

    AttentionInterface.register("capture", capture)
    config = InklingTextConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=WIDTH // HEADS,
        d_rel=RANK,
        rel_extent=EXTENT,
        log_scaling_n_floor=FLOOR,
        log_scaling_alpha=0.7,
        local_layer_ids=[],
    )
    config._attn_implementation = "capture"
    attention = modeling_inkling.InklingAttention(config, layer_idx=0)
    torch.manual_seed(0)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, LENGTH, WIDTH)
    attention(x, torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None])
    return attention, x


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_inkling(backend):
    captured: dict[str, Any] = {}
    with torch.no_grad():
        attention, x = attend_by_inkling(captured)
    spec = f"inkling(rank={RANK},extent={EXTENT})"
    encoding = PositionEncoding(spec, WIDTH, HEADS, LENGTH, causal=True)
    ours = encoding.encodings["inkling"]
    with torch.no_grad():
        ours.projection.weight.copy_(attention.r_proj.weight)
        # Theirs begins with the query's own distance, ours ends there.
        ours.table.copy_(attention.rel_logits_proj.proj.flip(1).T)
    tau = 1 + 0.7 * (torch.arange(1, LENGTH + 1) / FLOOR).clamp(min=1).log()
    query = captured["query"] / tau[:, None]
    query = query * captured["scaling"] * (WIDTH // HEADS) ** 0.5  # they divide by d
    both = f"{spec}+logn(factor=0.7,length={FLOOR})"
    with_logn = PositionEncoding(both, WIDTH, HEADS, LENGTH, causal=True)
    with_logn.load_state_dict(encoding.state_dict())
    with torch.no_grad():
        attended = with_logn.attend(
            query, captured["key"], captured["value"], backend=backend, inputs=x
        )
    torch.testing.assert_close(attended, captured["attended"], **TOLERANCE)


def test_lerope():
    config = MistralLarge4TextConfig()
    theirs = mistral.MistralLarge4TextRotaryEmbedding(config)
    dims = Dims(2 * config.head_dim, 2, max_positions=4096)
    ours = LeRope(dims, scaling=Scaling.parse("yarn:2048:length=512:attention_factor=1"))
    torch.manual_seed(0)
    with torch.no_grad():
        theirs.alpha.normal_(std=0.3)
        ours.alpha.copy_(theirs.alpha)
    ids = torch.randint(0, 2000, (2, LENGTH))
    x = torch.randn(2, 2, LENGTH, config.head_dim)
    turned, _ = mistral.apply_rotary_pos_emb_interleave(x, x, *theirs(x, ids))
    rotated = ours.rotation(ids).rotate_queries(x)
    rotated = torch.cat([rotated[..., ::2], rotated[..., 1::2]], -1)  # the order of theirs
    torch.testing.assert_close(rotated, turned, rtol=1e-4, atol=1e-4)
    weight = torch.randn_like(x)
    our_gradient, their_gradient = (
        torch.autograd.grad((y * weight).sum(), module.alpha)[0]
        for y, module in ((rotated, ours), (turned, theirs))
    )
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-3, atol=0.1)  # angles of 2000


def test_ssmax_with_offset():
    theirs = mistral.MistralLarge4TextSoftmaxScaling(HEADS)
    ours = Ssmax(Dims(WIDTH, HEADS, LENGTH, causal=True), offset=True)
    torch.manual_seed(0)
    with torch.no_grad():
        ours.factor.copy_(theirs.scale.normal_())
        ours.offset.copy_(theirs.bias.normal_())
    query, key, value = torch.randn(3, 1, HEADS, LENGTH, WIDTH // HEADS)
    scaled = theirs(query, torch.arange(LENGTH)[None], head_dim_first=True)
    reference = BACKENDS["reference"]
    terms = terms_of(count_temperature=(ours.factor, ours.offset))
    attended, _ = reference.attend(AttentionCall(query, key, value, terms, Mask("lr")))
    expected, _ = reference.attend(AttentionCall(scaled, key, value, terms_of(), Mask("lr")))
    torch.testing.assert_close(attended, expected, **TOLERANCE)
