"""The tables of ``docs/results/parity.md``: largest differences to the float64 oracles.

``python -m tests.helpers.parity`` prints them; the tests hold each to its bound.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fairseq_posenc import registry
from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.backends import planner
from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.workbench.results import markdown
from tests.encodings.test_second_oracles import CASES, REAL, batch, built, expected
from tests.helpers import oracles
from tests.helpers.formulas import DIMS, awake, their_scores
from tests.transformer.test_windows import visible

LENGTH, WIDTH, HEADS = 17, DIMS.embed_dim, DIMS.num_heads
EVERY_KEY = f"window(size={2 * LENGTH})"
FAMILIES = {True: "causal", False: "encoder"}
ENCODINGS = [
    name
    for name in registry.names()
    if registry.get(name).acts_on in ("scores", "rotation") and name != "shaw_values"
]
PLACES = {  # a spec, the limits within a document, and the document of each token
    "per layer": ("{},none", EVERY_KEY, None),
    "window": ("{}+window(size=4)", "window(size=4)", None),
    "documents": ("{}+documents", EVERY_KEY, [0] * 5 + [1] * 2 + [2] * 10),
}


@torch.no_grad()
def compare_encoding(name: str, place: str, causal: bool) -> float:
    """Compute the largest difference of a layer's output to the oracle, on the backend ``auto``."""
    torch.manual_seed(3)
    pattern, limits, documents = PLACES[place]
    positions = (
        StackPositions(pattern.format(name), WIDTH, HEADS, DIMS.max_positions, causal)
        .double()
        .eval()
    )
    layer = SelfAttention(positions).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    for encodings in (positions.shared, layer.encodings):
        awake(encodings)
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    ids = torch.tensor([documents or [0] * LENGTH])
    ours = layer(*positions(x, document_ids=ids if documents else None))[0]
    every = Encodings({**positions.shared.as_dict(), **layer.encodings.as_dict()})
    direction = "lr" if causal else "both"
    differences = []
    for same in (ids == document for document in ids.unique()):
        allowed = visible(limits, direction, int(same.sum()))
        theirs = formula(layer, every, name, allowed, x[same], causal)
        differences.append(_difference(ours[same], theirs))
    return max(differences)


def formula(layer, encodings, name: str, allowed: Tensor, x: Tensor, causal: bool) -> Tensor:
    """Attend one document without padding ``(length, C)`` by the oracles."""
    query, key, value = (
        projection(x).unflatten(1, (HEADS, -1)).transpose(0, 1)  # [H, T, D]
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    options = {"project_query": layer.q_proj, "project_key": layer.k_proj}
    scores = their_scores(encodings, name, query, key, x, **options, bidirectional=not causal)
    return layer.out_proj(oracles.attention(scores, value, allowed).transpose(0, 1).flatten(1))


@torch.no_grad()
def compare_feature(case, causal: bool, backend: str) -> float:
    """Compute the largest difference over sentences with padding on either side."""
    positions, layer = built(case, causal, backend)
    x, padding = batch()
    out = layer(*positions(x, padding))[0]
    return max(
        _difference(out[row, start:end], expected(case, causal, layer, x[row, start:end])[0])
        for row, (start, end) in enumerate(REAL)
    )


def tabulate_encodings() -> str:
    """Tabulate encodings of the scores by place and family."""
    rows = []
    for name in ENCODINGS:
        kind = registry.get(name)
        cells = [
            "-"
            if kind.causal_only and not causal
            else f"{compare_encoding(name, place, causal):.0e}"
            for place in PLACES
            for causal in FAMILIES
        ]
        rows.append([f"`{name}`", *cells])
    titles = [f"{place}, {family}" for place in PLACES for family in FAMILIES.values()]
    return markdown.table(["encoding", *titles], rows, "l" + "r" * len(titles))


def tabulate_features() -> str:
    """Tabulate features of 2024 to 2026 by family and backend."""
    rows: dict[str, list[str]] = {}
    titles = [(causal, name) for causal in FAMILIES for name in ("reference", "blocked", "sdpa")]
    for case in CASES:
        cells = rows.setdefault(case.spec, ["-"] * len(titles))
        for place, (causal, backend) in enumerate(titles):
            if causal in case.causal and backend in case.backends:
                cells[place] = f"{compare_feature(case, causal, backend):.0e}"
    lines = [[f"`{spec}`", *cells] for spec, cells in rows.items()]
    heads = [f"{FAMILIES[causal]}, {backend}" for causal, backend in titles]
    return markdown.table(["feature", *heads], lines, "l" + "r" * len(heads))


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


if __name__ == "__main__":
    planner.SHORT = 0  # so that `auto` takes blocks of short sentences, too
    logging.getLogger().setLevel(logging.WARNING)
    print(tabulate_encodings(), tabulate_features(), sep="\n\n")
