"""Our encodings give what Hugging Face's transformers gives, weights copied, whole tensors.

The cases, and their side of each, are in ``their_modules.py``; of three classes that have left
transformers there are examples of 4.57.6. ``python -m tests.encodings.test_huggingface`` prints the
largest differences as a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor
from torch.nn import functional as F
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.models.t5 import modeling_t5

from fairseq_posenc.backends.by_distance import expand_by_distance
from fairseq_posenc.encodings.base import Dims, Encodings
from fairseq_posenc.encodings.projected_distances import DebertaV2
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.t5 import Buckets
from fairseq_posenc.positions import Positions
from tests.encodings import their_modules as hf
from tests.encodings.their_modules import CASES, Case, Size, Tensors
from tests.helpers.formulas import build
from tests.helpers.lone_attention import LoneAttention

PAD, EOS = 1, 2
Ours = Callable[[Encodings, Dims, Tensors], Tensors]
EXAMPLES = Path(__file__).parents[1] / "goldens"


def ours_of(case: Case, size: Size, given: Tensors) -> Tensors:
    """Compute our encoding for a case, under the names that theirs have."""
    dims = Dims(size.width, size.heads, size.positions, case.causal)
    return compute(case.spec, dims, OURS[case.theirs], given)


def compute(spec: str, dims: Dims, ours: Ours, given: Tensors) -> Tensors:
    with torch.no_grad():
        return ours(build(spec, dims).double(), dims, given)


def attended(
    encodings: Encodings, dims: Dims, x: Tensor, projections: Tensors, parameters: Tensors
) -> Tensors:
    """Return output and weights of our attention.

    What ``projections`` leaves out is neutral: biases 0, the output projection the identity.
    """
    direction = "lr" if dims.causal else "both"
    attention = LoneAttention(dims.embed_dim, dims.num_heads, encodings, direction).double()
    (name,) = encodings
    state = {
        key: torch.zeros_like(value)
        for key, value in attention.state_dict().items()
        if key.endswith("_proj.bias")
    }
    state["out_proj.weight"] = torch.eye(dims.embed_dim)
    state.update(projections)
    state.update((f"encodings.{name}.{key}", value) for key, value in parameters.items())
    attention.load_state_dict(state)  # strict: every parameter of ours is one of theirs
    attention.eval()
    _, weights = attention(*[x.transpose(0, 1)] * 3, need_head_weights=True)
    output, _ = attention(*[x.transpose(0, 1)] * 3, need_weights=False)
    return {"output": output.transpose(0, 1), "weights": weights.transpose(0, 1)}


def linears(given: Tensors, *names: str) -> Tensors:
    """Return the weights and biases of their projections under our names."""
    return {
        f"{our}.{part}": given[f"{their}.{part}"]
        for our, their in zip(("q_proj", "k_proj", "v_proj", "out_proj"), names)
        for part in ("weight", "bias")
        if f"{their}.{part}" in given
    }


def bert(encodings: Encodings, dims: Dims, given: Tensors) -> Tensors:
    # Their rows run over i - j, ours over j - i.
    table = {"table.weight": given["distance_embedding.weight"].flip(0)[None]}
    return attended(encodings, dims, given["x"], linears(given, "query", "key", "value"), table)


def wav2vec2_bert(encodings: Encodings, dims: Dims, given: Tensors) -> Tensors:
    table = {"table.weight": given["distance_embedding.weight"][None]}
    projections = linears(given, "linear_q", "linear_k", "linear_v", "linear_out")
    return attended(encodings, dims, given["x"], projections, table)


def t5(encodings: Encodings, dims: Dims, given: Tensors) -> Tensors:
    encoding: Any = encodings["t5"]
    encoding.scale_factor = 1 / dims.head_dim  # theirs are not scaled
    table = {"table": given["relative_attention_bias.weight"].T}
    found = attended(encodings, dims, given["x"], linears(given, *"qkvo"), table)
    return {"output": found["output"], "bias": bias_of(encodings, given["x"].size(1))}


def bias_of(encodings: Encodings, length: int) -> Tensor:
    terms: Any = encodings.terms(plain_positions(length)).expanded()  # it has a bias
    return expand_by_distance(terms.bias.table, length, length)[0]


def plain_positions(length: int) -> Positions:
    return Positions.from_tokens(torch.full((1, length), 5), PAD, EOS, length)


def deberta_v2(encodings: Encodings, dims: Dims, given: Tensors) -> Tensors:
    parameters = {
        "table": given["rel_embeddings.weight"],
        "norm_weight": given["norm.weight"],
        "norm_bias": given["norm.bias"],
    }
    projections = linears(given, "self.query_proj", "self.key_proj", "self.value_proj")
    return attended(encodings, dims, given["x"], projections, parameters)


def transfo_xl(encodings: Encodings, dims: Dims, given: Tensors) -> Tensors:
    # Their sinusoids have all sines first, ours alternate: the columns change places.
    columns = torch.arange(dims.embed_dim).view(2, -1).T.flatten()
    parameters = {
        "projection": given["r_net.weight"][:, columns],
        "u": given["r_w_bias"],
        "v": given["r_r_bias"],
    }
    query, key, value = given["qkv_net.weight"].chunk(3)
    projections = {
        "q_proj.weight": query,
        "k_proj.weight": key,
        "v_proj.weight": value,
        "out_proj.weight": given["o_net.weight"],
    }
    found = attended(encodings, dims, given["x"], projections, parameters)
    norm = (given["layer_norm.weight"], given["layer_norm.bias"])
    return {**found, "output": F.layer_norm(given["x"] + found["output"], (dims.embed_dim,), *norm)}


def wav2vec2_conformer(encodings: Encodings, dims: Dims, given: Tensors) -> Tensors:
    parameters = {
        "projection": given["linear_pos.weight"],
        "u": given["pos_bias_u"],
        "v": given["pos_bias_v"],
    }
    projections = linears(given, "linear_q", "linear_k", "linear_v", "linear_out")
    return attended(encodings, dims, given["x"], projections, parameters)


def rotated(encodings: Encodings, dims: Dims, given: Tensors) -> Tensors:
    query, key = (
        given[name].unflatten(-1, (dims.num_heads, -1)).transpose(1, 2) for name in ("query", "key")
    )
    rotation = encodings.rotation(torch.arange(query.size(2))[None])
    assert rotation is not None
    return {"query": rotation.rotate_queries(query), "key": rotation.rotate_keys(key)}


def bloom(encodings: Encodings, dims: Dims, given: Tensors) -> Tensors:
    length = dims.max_positions
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return {"bias": bias_of(encodings, length).masked_fill(later, 0.0)}


def sinusoidal(encodings: Encodings, dims: Dims, given: Tensors) -> Tensors:
    encoding: Any = encodings["sinusoidal"]
    return {"vectors": encoding.embed(plain_positions(dims.max_positions))[0]}


OURS: dict[Callable, Ours] = {
    hf.wav2vec2_bert: wav2vec2_bert,
    hf.t5: t5,
    hf.deberta_v2: deberta_v2,
    hf.wav2vec2_conformer: wav2vec2_conformer,
    hf.roformer: rotated,
    hf.llama: rotated,
    hf.gpt_neox: rotated,
    hf.bloom: bloom,
    hf.distilbert: sinusoidal,
    hf.fsmt: sinusoidal,
}


def assert_equal(ours: Tensors, theirs: Tensors, tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, id="-".join(map(str, (name, *size))))
        for name, case in CASES.items()
        for size in case.sizes
    ],
)
def test_ours_equals_theirs(name, size):
    case = CASES[name]
    given = hf.draw(case, size)
    ours, theirs = ours_of(case, size, given), hf.compute(case, size, given)
    assert_equal(ours, theirs, case.tolerance)


# BERT's relative_key and relative_key_query, and Transformer-XL, which looks back.
GONE = {"shaw": bert, "m4": bert, "transformer_xl": transfo_xl}


@pytest.mark.parametrize("name", GONE)
def test_ours_equals_the_example_of_a_class_that_has_gone(name):
    stored = json.loads((EXAMPLES / f"{name}.json").read_text(encoding="utf-8"))
    given, theirs = (
        {key: torch.tensor(value, dtype=torch.float64) for key, value in stored[group].items()}
        for group in ("given", "theirs")
    )
    ours = compute(name, Dims(8, 2, 6, causal=GONE[name] is transfo_xl), GONE[name], given)
    assert_equal(ours, theirs, 1e-5 if name == "transformer_xl" else 1e-8)  # they are rounded


@pytest.mark.parametrize("both_sides", [True, False])
@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (8, 30), (64, 512)])
def test_t5_buckets_equal_theirs_at_every_distance(both_sides, buckets, reach):
    distances = torch.arange(-2000, 2001)
    starts, rows = Buckets.of_t5("t5", buckets, reach, both_sides)
    ours = torch.tensor(rows)[Runs(starts, 0, 0).find(distances)]
    find_theirs = modeling_t5.T5Attention._relative_position_bucket
    assert torch.equal(ours, find_theirs(distances, both_sides, buckets, reach))


@pytest.mark.parametrize(
    ("buckets", "positions"), [(256, 512), (32, 128), (8, 24), (4, 2000), (3, 24), (2, 24)]
)
def test_deberta_v2_buckets_equal_theirs_at_every_distance(buckets, positions):
    distances = torch.arange(-2000, 2001)
    starts, rows = DebertaV2(Dims(8, 2, positions), buckets=buckets).bucket_rule
    ours = torch.tensor(rows)[Runs(starts, 0, 0).find(-distances)]
    theirs = modeling_deberta_v2.make_log_bucket_position(distances, buckets, positions)
    # Beyond the ends of the table, all distances have the same row.
    assert torch.equal(ours, (theirs.long() + buckets).clamp(0, 2 * buckets - 1))


def test_sinusoids_equal_those_of_fairseq_with_padding():
    tokens = torch.tensor([[0, 7, 8, 9, EOS], [PAD, PAD, 0, 7, EOS], [0, 7, EOS, PAD, PAD]])
    encodings = build("sinusoidal(layout=fairseq)", Dims(16, 2, 9))
    ours = encodings["sinusoidal"].embed(Positions.from_tokens(tokens, PAD, EOS, 5))
    theirs = SinusoidalPositionalEmbedding(16, PAD)(tokens)
    real = tokens.ne(PAD)
    torch.testing.assert_close(ours[real], theirs[real], rtol=0, atol=1e-6)


if __name__ == "__main__":
    print("| encoding | equals | longest input | largest absolute difference |")
    print("|---|---|--:|--:|")
    for case in CASES.values():
        found, length = 0.0, max(size.length for size in case.sizes)
        for size in case.sizes:
            given = hf.draw(case, size)
            ours, theirs = ours_of(case, size, given), hf.compute(case, size, given)
            assert ours.keys() == theirs.keys()
            found = max(found, *((ours[key] - theirs[key]).abs().max().item() for key in theirs))
        print(f"| `{case.spec}` | {case.against} | {length} | {found:.0e} |")
