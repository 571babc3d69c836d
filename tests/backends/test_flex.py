"""The backend on torch's FlexAttention: against the reference, uncompiled and compiled."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.backends import choose, flex, reference
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.flex import build_block_mask
from fairseq_posenc.backends.flex.scores import round_length
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.mask import Mask
from fairseq_posenc.modules.layer_positions import PositionEncoding
from fairseq_posenc.registry import names
from tests.helpers.products import product_of, some_of
from tests.helpers.terms import draft_call
from tests.helpers.tiny_models import needs_causal
from tests.helpers.uncompiled_flex import attend_traced, run_uncompiled

LIMITS = ["none+window(size=6)", "m4m+window(size=6)", "t5+chunk(size=5)", "deberta+window(size=9)"]
LIMITS += ["m4m+window(size=4,first=2)", "t5+window(size=5,first=3)"]
RESETS = ["tupe+reset", "m4+reset", "deberta+reset"]
REFUSED = {"m3": "channel", "shaw_values": "table of values", "cope": "all scores", "fox": "decay"}
SERVED = [name for name in names() if name not in REFUSED]
MODELS = dict.fromkeys(
    (spec, causal or needs_causal(spec))
    for spec, causal in product_of([*SERVED, *LIMITS, *RESETS], [False, True])
)


def _call(
    spec: str, batch: int, length: int, causal: bool, left: bool, tgt_len: int = 0
) -> AttentionCall:
    torch.manual_seed(batch + length)
    layer = PositionEncoding(spec, 32, 4, 512, causal)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    query, key, value = (torch.randn(batch, 4, length, 8) for _ in range(3))
    query = query[:, :, -tgt_len:]
    padding = torch.zeros(batch, length, dtype=torch.bool)
    for row in range(1, batch):
        padding[row, : 2 * row] = left
        padding[row, length - 2 * row :] = not left
    with torch.no_grad():
        return layer._build_call(query, key, value, padding, torch.randn(batch, length, 32))


def _largest_difference(call: AttentionCall) -> float:
    with torch.no_grad():
        found, none = flex.attend(call)
        expected, _ = reference.attend(call)
    assert none is None
    assert found.dtype == call.value.dtype
    real = torch.ones(1, dtype=torch.bool)
    if (padding := call.mask.key_padding) is not None:
        real = ~padding[:, None, -found.size(2) :, None]
    assert not found.isnan().any()
    return float(((found.float() - expected.float()).abs() * real).max())


@pytest.fixture
def uncompiled(monkeypatch):
    """Let torch compute the same functions without a kernel, for each pair."""
    run_uncompiled(monkeypatch)


@pytest.mark.parametrize(("spec", "causal", "left"), product_of(MODELS, [False, True]))
def test_functions_of_scores_and_masks(spec, causal, left, uncompiled):
    assert _largest_difference(_call(spec, 3, 19, causal, left)) < 1e-5


KINDS = [*LIMITS, *RESETS, "m1", "transformer_xl", "kerple", "inkling"]  # of terms and masks


@pytest.mark.parametrize("spec", some_of(KINDS, [*SERVED, *LIMITS, *RESETS]))
def test_functions_are_traced_as_by_a_compiler(spec, monkeypatch):
    run_uncompiled(monkeypatch, attend_traced)
    assert _largest_difference(_call(spec, 3, 19, needs_causal(spec), True)) < 1e-5


@pytest.mark.parametrize("spec", ["m4m", "t5", "tupe+reset", "none+window(size=6)"])
def test_steps_of_decoding(spec, uncompiled):
    assert _largest_difference(_call(spec, 3, 19, True, True, tgt_len=1)) < 1e-5
    assert _largest_difference(_call(spec, 1, 1, True, True, tgt_len=1)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_16_bits_are_added_up_in_32(dtype, uncompiled):
    call = _call("m4m", 3, 19, True, True)
    query, key, value = (x.to(dtype) for x in call[:3])
    found = _largest_difference(call._replace(query=query, key=key, value=value))
    assert found < 4 * torch.finfo(dtype).eps


def test_tokens_at_one_position_have_a_single_distance(uncompiled):
    """Then no row of a table begins at another distance than the lowest."""
    found = []
    for backend in ("flex", "reference"):
        torch.manual_seed(0)
        positions = StackPositions("transformer_xl", 32, 4, 512)
        layer = SelfAttention(positions, backend=backend).requires_grad_(False).eval()
        x, shared = positions(torch.randn(2, 3, 32), position_ids=torch.zeros(2, 3).long())
        found.append(layer(x, shared)[0])
    torch.testing.assert_close(*found)


def test_a_query_that_sees_no_key_gets_zeros(uncompiled):
    padding = torch.ones(1, 5, dtype=torch.bool)
    call = AttentionCall(*(torch.randn(1, 2, 5, 8) for _ in range(3)), Terms(), Mask("lr", padding))
    with torch.no_grad():
        assert not flex.attend(call)[0].any()


def test_pairs_that_must_not_see_each_other(uncompiled):
    pairs = torch.rand(7, 7).lt(0.4) & ~torch.eye(7, dtype=torch.bool)
    call = AttentionCall(
        *(torch.randn(2, 2, 7, 8) for _ in range(3)), Terms(), Mask("both", None, pairs)
    )
    with torch.no_grad():
        torch.testing.assert_close(flex.attend(call)[0], reference.attend(call)[0])


@pytest.mark.parametrize("limits", [{}, {"window": 40}, {"window": 300}])
@pytest.mark.parametrize("direction", ["both", "lr", "rl"])
def test_tiles_are_left_out_or_whole_as_their_pairs_are(direction, limits):
    padding = torch.zeros(2, 700, dtype=torch.bool)
    padding[1, :200] = padding[1, -150:] = True
    mask = Mask(direction, padding, **limits)
    blocks = build_block_mask(mask, 600, 700, padding.device)
    hidden = torch.ones(2, 640, 768, dtype=torch.bool)  # whole tiles
    hidden[:, :600, :700] = mask.forbidden(600, 700, padding.device)[:, 0]
    tiles = hidden.unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
    lists = {
        "partly": (blocks.kv_num_blocks, blocks.kv_indices),
        "whole": (blocks.full_kv_num_blocks, blocks.full_kv_indices),
    }
    found = {}
    for name, (count, indices) in lists.items():
        chosen = torch.arange(6) < count[..., None]  # of each tile of queries, the first of a list
        marked = torch.zeros(2, 1, 5, 6, dtype=torch.bool)
        found[name] = marked.scatter(-1, indices.long(), chosen)[:, 0]
    found["some"] = found["partly"] | found["whole"]
    for name, expected in (("whole", ~tiles.any(4).any(2)), ("some", ~tiles.all(4).all(2))):
        assert torch.equal(found[name][0], expected[0])
        assert not (expected[1] & ~found["some"][1]).any()  # padding makes more tiles partly so
    assert not (found["whole"] & tiles.any(4).any(2)).any()


@pytest.mark.matrix
def test_kernels_skip_tiles_and_serve_new_lengths():
    """Windows over several tiles; lengths of as many tiles compile nothing."""
    spec = "m4m+window(size=40)"
    for length in (300, 317, 384):  # a single sentence: torch compiles no other batch on a CPU
        assert _largest_difference(_call(spec, 1, length, True, True)) < 1e-5
        if length == 300:
            before = dict(counters["stats"])
    assert counters["stats"]["unique_graphs"] == before["unique_graphs"]


@pytest.mark.parametrize("spec", ["m4m+ssmax", "tupe"])
def test_one_kernel_serves_every_batch(spec, monkeypatch):
    compiled = torch.compile(flex_attention, fullgraph=True, backend="eager")
    monkeypatch.setattr(flex, "_compile_attention", lambda: compiled)
    graphs = set()
    for batch in (2, 3, 4):
        assert _largest_difference(_call(spec, batch, 20, True, True)) < 1e-5
        graphs.add(counters["stats"]["unique_graphs"])
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "backend",  # a kernel in C++ takes half a minute to compile
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.matrix)],
)
def test_functions_of_documents_and_a_reset_are_one_graph(backend, monkeypatch):
    compiled = torch.compile(flex_attention, fullgraph=True, backend=backend)
    monkeypatch.setattr(flex, "_compile_attention", lambda: compiled)
    call = _call("tupe+reset", 1, 260, True, False)
    mask = call.mask._replace(segments=torch.arange(260)[None] // 90)
    assert _largest_difference(call._replace(mask=mask)) < 1e-5


def test_lengths_are_rounded_to_few():
    lengths = (1, 2, 128, 129, 1024, 1025, 4097)
    assert [round_length(n) for n in lengths] == [1, 128, 128, 256, 1024, 1280, 5120]
    assert len({round_length(n) for n in range(1, 16_385)}) < 40


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dropout": 0.1}, "FlexAttention has no dropout of weights"),
        ({"device": "cpu"}, "it runs on a GPU, not on cpu"),
        ({"head_dim": 8}, "its heads are 16 wide or more, not 8"),
    ],
)
def test_what_it_cannot_do_is_said_in_a_line(changes, reason):
    with pytest.raises(UserError, match="position backend flex cannot compute this: " + reason):
        choose("flex", draft_call(**{"device": "meta", **changes}))
    assert choose("flex", draft_call(device="meta", need_weights=True))[0] == "reference"
    assert not flex.refuses(draft_call(device="meta", head_dim=16))


@pytest.mark.parametrize("spec", REFUSED)
def test_terms_that_it_cannot_compute_are_refused(spec):
    assert REFUSED[spec] in flex.refuses(draft_call(_call(spec, 1, 3, True, False).terms, "meta"))
