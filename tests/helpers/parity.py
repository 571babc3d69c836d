"""Tables of the largest differences to the float64 oracles.

``python -m tests.helpers.parity`` prints them; the tests hold each to its bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from fairseq_posenc import registry
from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.backends import flex, planner
from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.results import markdown
from tests.encodings.test_second_oracles import (
    CASES,
    REAL,
    Case,
    N,
    batch,
    built,
    draw_parameter,
    expected,
)
from tests.helpers import oracles
from tests.helpers.formulas import DIMS, EOS, PAD, awake, their_scores
from tests.helpers.tiny_models import make_model
from tests.transformer.test_windows import visible

LENGTH, WIDTH, HEADS = 17, DIMS.embed_dim, DIMS.num_heads
EVERY_KEY = f"window(size={2 * LENGTH})"
FAMILIES = ("causal", "encoder", "translation")
BACKENDS = ("reference", "blocked", "sdpa", "flex")
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
# The lengths of the documents of each row.
SOURCES, TARGETS = [[5, 2, 10], [3, 4]], [[4, 6], [9, 2, 4]]


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
    differences = []
    for same in (ids == document for document in ids.unique()):
        theirs = formula(layer, every, name, limits, x[same], causal)
        differences.append(_difference(ours[same], theirs))
    return max(differences)


def formula(layer, encodings, name: str, limits: str, x: Tensor, causal: bool) -> Tensor:
    """Attend one document without padding ``(length, C)`` by the oracles."""
    query, key, value = (
        projection(x).unflatten(1, (HEADS, -1)).transpose(0, 1)  # [H, T, D]
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    options = {"project_query": layer.q_proj, "project_key": layer.k_proj}
    scores = their_scores(encodings, name, query, key, x, **options, bidirectional=not causal)
    allowed = visible(limits, "lr" if causal else "both", len(x))
    return layer.out_proj(oracles.attention(scores, value, allowed).transpose(0, 1).flatten(1))


class Attended(NamedTuple):
    """What a self-attention of a translation model was given for a document, and gave."""

    stack: Any  # encoder or decoder
    number: int  # of the layer in its stack
    inputs: Tensor  # `(length, C)`
    outputs: Tensor  # the same shape


def run_translation(
    spec: str,
    in_encoder: bool,
    whole_rows: bool,
    max_positions: int,
    prepare: Callable[[Any], None],
    **options: Any,
) -> Iterator[Attended]:
    """Run a translation model, padded on the left of sources and on the right of targets.

    Args:
        spec: of the decoder, and of the encoder if ``in_encoder``.
        in_encoder: False for encodings that are for causal models.
        whole_rows: whether a row is one document.
        max_positions: of both sides.
        prepare: makes the model ready, its parameters included.
        **options: of the model.
    """
    options |= {f"max_{side}_positions": max_positions for side in ("source", "target")}
    for side in ("encoder", "decoder"):
        options |= {f"{side}_embed_dim": WIDTH, f"{side}_attention_heads": HEADS}
    # Inputs of about one, as layers norm them: the bounds are absolute.
    options |= {"position_encoding": spec if in_encoder else "none", "no_scale_embedding": True}
    model = make_model("translation", position_encoding_decoder=spec, **options)
    prepare(model)
    seen: dict[Any, tuple[Tensor, Tensor]] = {}
    for stack in (model.encoder, model.decoder):
        for layer in stack.layers:
            layer.self_attn.register_forward_hook(
                lambda module, args, kwargs, out: seen.update({module: (kwargs["query"], out[0])}),
                with_kwargs=True,
            )
    rows = [[[sum(row)] if whole_rows else row for row in rows] for rows in (SOURCES, TARGETS)]
    source = _make_tokens(rows[0], ends=True)
    model(source, source.ne(PAD).sum(1), _make_tokens(rows[1], ends=False))
    for stack, lengths, left in ((model.encoder, rows[0], True), (model.decoder, rows[1], False)):
        if stack is model.encoder and not in_encoder:
            continue
        longest = max(map(sum, lengths))
        for number, layer in enumerate(stack.layers):
            x, out = seen[layer.self_attn]  # [T, B, C]
            for row, documents in enumerate(lengths):
                start = longest - sum(documents) if left else 0
                for length in documents:
                    own = slice(start, start := start + length)
                    yield Attended(stack, number, x[own, row], out[own, row])


def _make_tokens(rows: list[list[int]], ends: bool) -> Tensor:
    """Make rows of documents that end with ``</s>``, padded on the left, or begin with it."""
    found = []
    for documents in rows:
        row = torch.cat([torch.randint(4, 24, (length,)) for length in documents])
        after = torch.tensor(documents).cumsum(0)
        row[after - 1 if ends else after - torch.tensor(documents)] = EOS
        missing = max(map(sum, rows)) - len(row)
        found.append(
            torch.nn.functional.pad(row, (missing, 0) if ends else (0, missing), value=PAD)
        )
    return torch.stack(found)


@torch.no_grad()
def compare_translation(name: str, place: str) -> float:
    """Compute the largest difference of a self-attention of a translation model to the oracle."""
    torch.manual_seed(3)
    pattern, limits, documents = PLACES[place]

    def prepare(model: Any) -> None:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        for module in model.modules():
            if isinstance(module, Encodings):
                awake(module)
        model.double()

    seen = run_translation(
        pattern.format(name),
        not registry.get(name).causal_reason,
        not documents,
        DIMS.max_positions,
        prepare,
    )
    differences = []
    for stack, number, x, ours in seen:
        layer = stack.layers[number].self_attn
        every = Encodings({**stack.encodings.as_dict(), **layer.encodings.as_dict()})
        spec = "none" if place == "per layer" and number else name
        theirs = formula(layer, every, spec, limits, x, stack.assembly.dims.causal)
        differences.append(_difference(ours, theirs))
    return max(differences)


@torch.no_grad()
def compare_feature(case: Case, family: str, backend: str) -> float:
    """Compute the largest difference over sentences with padding on either side.

    Raises:
        UserError: the backend refuses such terms.
    """
    if family == "translation":
        return _compare_feature_in_translation(case, backend)
    causal = family == "causal"
    positions, layer = built(case, causal, backend)
    x, padding = batch()
    if backend == "flex":  # which has no float64 on a CPU
        positions, layer, x = positions.float(), layer.float(), x.float()
    out = layer(*positions(x, padding))[0]
    return max(
        _difference(out[row, start:end], expected(case, causal, layer, x[row, start:end])[0])
        for row, (start, end) in enumerate(REAL)
    )


def _compare_feature_in_translation(case: Case, backend: str) -> float:
    torch.manual_seed(5)

    def prepare(model: Any) -> None:
        for name, parameter in model.named_parameters():
            draw_parameter(name, parameter)
        if case.trained_on:
            for stack in (model.encoder, model.decoder):
                identity = stack.identity._replace(trained_length=case.trained_on)
                stack.set_extra_state(identity.to_tensor())
        model.to(torch.float32 if backend == "flex" else torch.float64)

    seen = run_translation(
        case.spec, False in case.causal, True, N, prepare, position_backend=backend
    )
    return max(
        _difference(
            ours,
            expected(case, stack.assembly.dims.causal, stack.layers[number].self_attn, x)[0],
        )
        for stack, number, x, ours in seen
    )


def tabulate_encodings() -> str:
    """Tabulate the largest difference of each encoding of the scores in any family, by place."""
    rows = []
    for name in ENCODINGS:
        sides = (True,) if registry.get(name).causal_reason else (True, False)
        cells = [
            max(
                compare_translation(name, place),
                *(compare_encoding(name, place, causal) for causal in sides),
            )
            for place in PLACES
        ]
        rows.append([f"`{name}`", *(f"{cell:.0e}" for cell in cells)])
    return markdown.table(["encoding", *PLACES], rows, "l" + "r" * len(PLACES))


def tabulate_features() -> str:
    """Tabulate the largest difference of features of 2024 to 2026 in any family, by backend."""
    rows: dict[str, dict[str, float]] = {}
    for case, family, backend in product(CASES, FAMILIES, BACKENDS):
        cells = rows.setdefault(case.spec, {})
        if backend in (*case.backends, "flex") and (family != "encoder") in case.causal:
            with suppress(UserError):
                difference = compare_feature(case, family, backend)
                cells[backend] = max(difference, cells.get(backend, 0.0))
    lines = [
        [f"`{spec}`", *(f"{cells[x]:.0e}" if x in cells else "-" for x in BACKENDS)]
        for spec, cells in rows.items()
    ]
    return markdown.table(["feature", *BACKENDS], lines, "l" + "r" * len(BACKENDS))


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


if __name__ == "__main__":
    planner.SHORT = 0  # so that `auto` takes blocks of short sentences, too
    # The same functions without a kernel.
    vars(flex)["_compile_attention"] = lambda: flex_attention
    logging.getLogger().setLevel(logging.WARNING)
    print(tabulate_encodings(), tabulate_features(), sep="\n\n")
