"""torch's fused attention on a CPU keeps a bias in float32, whatever the type of the queries."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend

from fairseq_posenc import registry
from fairseq_posenc.api import PositionEncoding, SelfAttention, StackPositions
from fairseq_posenc.backends import BACKENDS, blocked, reference, sdpa
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.by_distance import expand_by_distance
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.term import ByDistance, NumbersByPair
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import DIRECTIONS, Mask
from fairseq_posenc.positions import Positions
from tests.helpers.formulas import awake, build, padding_of
from tests.helpers.terms import draft_call, terms_of, whole_call
from tests.helpers.tiny_models import needs_causal

DIMS = Dims(embed_dim=32, num_heads=4, max_positions=64)
LENGTH = 48


def terms_with(name: str) -> Terms:
    """Return an encoding's terms, with parameters large enough for an error to show."""
    encoding = build(name, DIMS)
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    tokens = torch.arange(LENGTH)[None] + 4
    return encoding.terms(Positions.from_tokens(tokens, padding_idx=1, eos_idx=2, tgt_len=LENGTH))


TERMS = {name: terms_with(name) for name in registry.names(encoder=True)}
DOT_PRODUCTS = [name for name, terms in TERMS.items() if terms.is_biased_dot_product]
BIASES = [name for name in DOT_PRODUCTS if TERMS[name].has(ByDistance, NumbersByPair)]


def test_there_are_biases():
    assert {"alibi", "t5", "raffel", "tupe"} <= set(BIASES)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value


def error(backend: str, qkv: Inputs, terms: Terms, exact: torch.Tensor) -> float:
    """Return the largest error against float64, before the output is rounded to 16 bits."""
    out, _ = BACKENDS[backend].attend(AttentionCall(*qkv, terms, Mask()))
    assert out.dtype == qkv[0].dtype
    return float((out.detach().double() - exact.detach()).abs().max())


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BIASES)
def test_a_bias_is_as_exact_as_on_blocked(name, dtype, autocast):
    torch.manual_seed(0)
    terms = terms_with(name)
    assert not BACKENDS["sdpa"].refuses(draft_call(terms, dtype=dtype))
    qkv = [torch.randn(3, 4, LENGTH, 8).to(dtype) for _ in range(3)]
    in_full = terms.map(lambda x: x.double() if x.is_floating_point() else x)
    precise = AttentionCall(*(x.double() for x in qkv), in_full, Mask())
    exact, _ = BACKENDS["reference"].attend(precise)
    blocked = error("blocked", qkv, terms, exact)
    with torch.autocast("cpu", dtype, enabled=autocast):
        ours = error("sdpa", qkv, terms, exact)
    # Both round the output to 16 bits: nearly equal numbers may fall on either side of a half.
    assert ours <= blocked * 1.01


def test_autocast_does_not_round_the_bias_of_a_network():
    layer = awake(PositionEncoding("fire", 32, 4, 64, causal=True))
    query, key = torch.randn(2, 1, 4, LENGTH, 8)
    exact = layer.scores(query, key)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.scores(query, key).equal(exact)


@pytest.mark.parametrize("length", [15, 16, 17, 33])
@pytest.mark.parametrize("name", ["none", *BIASES])
def test_a_model_in_float64_has_the_scores_of_the_reference(name, length):
    """torch reads a float32 bias beside float64 queries wrongly, from 16 keys on."""
    causal = needs_causal(name)
    encoding = awake(PositionEncoding(name, 16, 2, 64, causal=causal)).double()
    qkv = torch.randn(3, 2, 2, length, 8, dtype=torch.float64)
    padding = padding_of(length, 0, 3)
    for direction, hidden in product(["lr"] if causal else DIRECTIONS, [None, padding]):
        exact = encoding.attend(*qkv, hidden, direction, backend="reference")
        for backend in ("sdpa", "auto"):
            ours = encoding.attend(*qkv, hidden, direction, backend=backend)
            torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


def test_gradients_of_a_bias_are_in_full_precision():
    """A gradient summed over sentences in 16 bits would lose most of them."""
    torch.manual_seed(0)
    bias = torch.randn(1, 2 * LENGTH - 1, requires_grad=True)
    qkv = [torch.randn(3, 4, LENGTH, 8).bfloat16() for _ in range(3)]
    grads = []
    for backend, inputs in (("sdpa", qkv), ("reference", [x.double() for x in qkv])):
        out, _ = BACKENDS[backend].attend(AttentionCall(*inputs, terms_of(bias=bias), Mask("lr")))
        (found,) = torch.autograd.grad(out.float().sum(), bias)
        grads.append(found.double())
    assert (grads[0] - grads[1]).norm() < 1e-3 * grads[1].norm()


def test_a_bias_by_distance_is_not_compiled_anew_for_each_length():
    counter = CompileCounter()

    @torch.compile(backend=counter)
    def pairs(table, x):
        return expand_by_distance(table, x.size(0), x.size(0))[0]

    for length in (5, 9, 13, 17, 21, 25):
        table = torch.randn(2, 2 * length - 1)
        index = torch.arange(length) - torch.arange(length)[:, None] + length - 1
        assert torch.equal(pairs(table, torch.empty(length)), table[:, index])
    assert counter.frame_count <= 2  # the second length makes it dynamic


@pytest.mark.parametrize("spec", ["none", "alibi", "t5", "fox", "rope+window(size=5)"])
def test_keys_of_fewer_heads_are_those_of_the_repeated_ones(spec):
    torch.manual_seed(2)
    positions = StackPositions(spec, 32, 4, 20, causal=True).double()
    layer = SelfAttention(positions, num_key_value_heads=2).double()
    x, shared = positions(torch.randn(2, 9, 32, dtype=torch.float64))
    call = whole_call(layer, shared[0], *layer.project(x), x)
    assert call.key.size(1) == 2
    whole, _ = reference.attend(call.with_all_heads())
    for backend in (sdpa, blocked, reference):
        torch.testing.assert_close(backend.attend(call)[0], whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("width", [6, 7, 8, 9])
def test_decay_has_a_width_that_torch_fuses_on_a_gpu(width, device, monkeypatch):
    """torch's memory-efficient kernel takes multiples of 4 in float32; all else is not fused."""
    count = sdpa._count_decay_channels
    monkeypatch.setattr(sdpa, "_count_decay_channels", lambda w, _: count(w, torch.device(device)))
    widths = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def record(query, key, value, *args, **kwargs):
        widths.extend(x.size(-1) for x in (query, key, value))
        return attend(query, key, value, *args, **kwargs)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", record)
    qkv = torch.randn(2, 4, 5, width), *torch.randn(2, 2, 4, LENGTH, width)
    call = AttentionCall(*qkv, terms_of(decay=torch.randn(2, 4, LENGTH, 1).cumsum(2)), Mask("lr"))
    ours, exact = (BACKENDS[name].attend(call)[0] for name in ("sdpa", "reference"))
    torch.testing.assert_close(ours, exact)
    assert widths == [{"cpu": width + 2, "cuda": -(-(width + 2) // 4) * 4}[device]] * 3


def test_cudnn_does_not_compute_what_it_computes_wrongly():
    bias = torch.zeros(1, 1, 2, 2)
    without_cudnn = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    assert sdpa._choose_kernels("cuda", bias, 192) == without_cudnn
    assert sdpa._choose_kernels("cuda", bias.requires_grad_(), 128) == without_cudnn
    assert not sdpa._choose_kernels("cuda", bias.detach(), 128)
    assert not sdpa._choose_kernels("cuda", None, 192)
    assert not sdpa._choose_kernels("cpu", bias, 192)
