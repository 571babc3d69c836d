"""Reference vectors: what the oracles give for small inputs, for other projects to test against.

``python -m tests.helpers.vectors`` writes ``docs/vectors/``: the arrays as safetensors, and what
they mean as JSON. ``test_vectors.py`` holds the package against them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fairseq_posenc import registry, specs
from fairseq_posenc.encodings.base import Dims
from tests.helpers import oracles
from tests.helpers.formulas import EOS, PAD, make, oracle_options, oracle_params

FOLDER = Path(__file__).parents[2] / "docs" / "vectors"
ARRAYS, MEANING = FOLDER / "vectors.safetensors", FOLDER / "vectors.json"
Arrays = dict[str, Tensor]
TOKENS = [[0, 7, 8, EOS, 9, 9, EOS, 7], [PAD, PAD, 0, 7, EOS, 9, EOS, 8]]


class Case(NamedTuple):
    """An encoding with options that are easily got wrong."""

    spec: str  # a single encoding
    note: str = ""  # what to look at
    heads: int = 2
    width: int = 8  # of a head
    tgt_len: int = 5  # queries, those of the last tokens
    src_len: int = 5  # keys
    max_positions: int = 8  # of the model, the length it was trained at
    causal: bool = False  # a model that looks back
    left: int = 0  # padding on the left of a second sentence; 0 for one sentence without any
    direction: str = ""  # what a query sees, where the attended values are compared

    @property
    def item(self) -> specs.Item:
        """The encoding, read."""
        (item,) = specs.parse(self.spec).items
        return item

    @property
    def dims(self) -> Dims:
        """The sizes of the model."""
        return Dims(self.heads * self.width, self.heads, self.max_positions, causal=self.causal)

    @property
    def options(self) -> dict:
        """What the oracles want to know."""
        return {**oracle_options(self.item, self.dims), "bidirectional": not self.causal}


LONG: dict[str, Any] = {"tgt_len": 2, "src_len": 40, "max_positions": 40}
CASES = {
    "none": Case("none"),
    "shaw": Case("shaw(max_distance=3)", "distances are clipped"),
    "shaw_step": Case("shaw(max_distance=3)", "one query, at the last position", tgt_len=1),
    "shaw_per_head": Case("shaw(per_head=true)"),
    "shaw_reset": Case("shaw(reset=true)", "the first real token's rows, not the row's", left=2),
    "shaw_values": Case("shaw_values(max_distance=3)", "of the weights after softmax"),
    "raffel": Case("raffel", "inside the scale"),
    "t5": Case("t5", "both directions; distances beyond the exact buckets", src_len=150, tgt_len=2),
    "t5_causal": Case("t5", "one direction", src_len=150, tgt_len=2, causal=True),
    "t5_16_buckets": Case("t5(num_buckets=16)"),
    "alibi": Case("alibi", "symmetric", heads=8, width=4),
    "alibi_6_heads": Case("alibi", "no power of two", heads=6, width=4),
    "alibi_12_heads": Case("alibi", "no power of two", heads=12, width=4),
    "alibi_asymmetric": Case("alibi(mode=asymmetric)", heads=8, width=4),
    "m1": Case("m1"),
    "m2": Case("m2"),
    "m3": Case("m3", "a gain for each channel"),
    "m4": Case("m4(max_distance=3)"),
    "m4_scale_factor": Case("m4(scale_factor=3)"),
    "m4_reset": Case("m4(reset=true)", left=2),
    "m4m": Case("m4m", "one scale for the product of three"),
    "m4m_reset": Case("m4m(reset=true)", left=2),
    "deberta": Case("deberta"),
    "deberta_tied": Case("deberta(tie_projections=true)"),
    "deberta_v2": Case("deberta_v2(buckets=6)", "log buckets", src_len=12, max_positions=16),
    "tupe": Case("tupe", "positions count real tokens", left=2),
    "tupe_reset": Case("tupe(reset=true)", left=2),
    "tupe_shared": Case("tupe_shared", left=2),
    "transformer_xl": Case("transformer_xl"),
    "kerple": Case("kerple"),
    "fire": Case("fire(threshold=4)", "progressive interpolation", causal=True, left=2),
    "sandwich": Case("sandwich(width=16)"),
    "fox": Case("fox", "both directions", left=2),
    "inkling": Case("inkling(extent=3)", "nothing beyond the extent", causal=True, left=2),
    "inkling_encoder": Case("inkling(extent=3,rank=2)", "rows for later keys as well", left=2),
    "pope": Case("pope", left=2),
    "cope": Case("cope(positions=4)", "as the causal mask counts", causal=True, left=2),
    "rope": Case("rope", left=2),
    "rope_half": Case("rope(layout=half)", "halves, not neighbors"),
    "rope_fraction": Case("rope(fraction=0.5)", "frequencies of the rotated part"),
    "rope_base": Case("rope(base=500)"),
    "rope_linear": Case("rope(scaling=linear:4)", tgt_len=2, src_len=40, max_positions=16),
    "rope_dynamic": Case(
        "rope(scaling=dynamic:2:length=16)", "of the model's length", src_len=40, max_positions=40
    ),
    "rope_llama3": Case("rope(scaling=llama3:8:length=16)", width=16, **LONG),
    "rope_longrope": Case(
        "rope(scaling=longrope:4:short=1/1/1/1:long=1/1.5/2/4:length=16)",
        "the second list, for a model with room for more",
        **LONG,
    ),
    "rope_proportional": Case(
        "rope(scaling=proportional:1:part=0.5)", "half of the pairs turn", tgt_len=2, src_len=40
    ),
    "rope_yarn_settings": Case(
        "rope(scaling=yarn:4:beta_fast=8:beta_slow=2:mscale=0.707:mscale_all_dim=1:truncate=false)",
        "no whole pairs",
        **{**LONG, "max_positions": 16},
    ),
    "rope_ntk": Case("rope(scaling=ntk:4)", tgt_len=2, src_len=40, max_positions=16),
    "rope_yarn": Case(
        "rope(scaling=yarn:4)",
        "the ramp is that of the trained length, 512; cosine and sine have a factor",
        width=32,
        **{**LONG, "max_positions": 512},
    ),
    "lerope": Case("lerope", "one set of frequencies for all heads", left=2),
    "lerope_yarn": Case(
        "lerope(layout=half,scaling=yarn:8:length=16:attention_factor=1)",
        "scaled frequencies are multiplied",
        **LONG,
    ),
    "xpos": Case("xpos", "keys grow where queries decay", causal=True, left=2),
    "learned": Case("learned"),
    "sentence_learned": Case("sentence_learned", "from 1 in each sentence; <s> has 0"),
    "sinusoidal": Case("sinusoidal", "sines and cosines take turns"),
    "sinusoidal_fairseq": Case("sinusoidal(layout=fairseq)", "all sines, then all cosines"),
    "causal_lr": Case("none", "sees its past", left=2, direction="lr"),
    "causal_rl": Case("none", "sees its future", left=2, direction="rl"),
}


def arrays_of(case: Case) -> Arrays:
    """Return inputs, outputs and gradients of a case, float64."""
    torch.manual_seed(0)
    place = registry.get(case.item.name).acts_on
    params = oracle_params(make(case.spec, case.dims), case.item.name)
    leaves = {f"param.{name}": x.detach().clone() for name, x in params.items()}
    if place == "input" and case.item.name != "none":
        fixed = {"tokens": torch.tensor(TOKENS)}
        return {**fixed, **_differentiated(leaves, lambda x: {"added": _added(case, fixed, x)})}
    batch = 2 if case.left else 1
    sizes = {"query": case.tgt_len, "key": case.src_len, "value": case.src_len}
    attends = case.direction or case.item.name == "shaw_values"
    for name, length in sizes.items():
        if attends or name != "value":
            leaves[name] = torch.randn((batch, case.heads, length, case.width), dtype=torch.float64)
    if case.item.name in ("fox", "inkling"):
        width = case.dims.embed_dim
        leaves["inputs"] = torch.randn(batch, case.src_len, width, dtype=torch.float64)
    padding = torch.zeros(batch, case.src_len, dtype=torch.bool)
    padding[1:, : case.left] = True
    output = "attended" if attends else "scores"
    found = _differentiated(leaves, lambda x: {output: _of_batch(case, padding, x)})
    return {"padding": padding, **found}


def _differentiated(leaves: Arrays, compute: Callable[[Arrays], Arrays]) -> Arrays:
    """Return leaves, outputs, what comes in at the outputs, and the gradients of the leaves."""
    for leaf in leaves.values():
        leaf.requires_grad_()
    outputs = compute(leaves)
    incoming = {name: torch.randn_like(x).where(~x.isnan(), 0.0) for name, x in outputs.items()}
    (total,) = [(x.nan_to_num() * incoming[name]).sum() for name, x in outputs.items()]
    if leaves:
        total.backward()
    grads = {f"{name}_grad": x.grad for name, x in leaves.items() if x.grad is not None}
    found = {**leaves, **outputs, **{f"{k}_incoming": v for k, v in incoming.items()}, **grads}
    return {name: x.detach().contiguous() for name, x in found.items()}


def _of_batch(case: Case, padding: Tensor, given: Arrays) -> Tensor:
    """Return scores or attended values; NaN where a query or a key is padding."""
    params = {name[6:]: x for name, x in given.items() if name.startswith("param.")}
    rows = []
    for b in range(padding.size(0)):
        left = case.left if b else 0
        query, key = (given[name][b, :, left:] for name in ("query", "key"))
        value = given["value"][b, :, left:] if "value" in given else None
        if "inputs" in given:
            params["inputs"] = given["inputs"][b, left:]
        found = _of_sentence(case, query, key, value, params)
        missing = (left, 0, left, 0) if value is None else (0, 0, left, 0)
        rows.append(torch.nn.functional.pad(found, missing, value=torch.nan))
    return torch.stack(rows)


def _of_sentence(
    case: Case, query: Tensor, key: Tensor, value: Tensor | None, params: Arrays
) -> Tensor:
    name, options = case.item.name, case.options
    tgt_len, src_len = query.size(1), key.size(1)
    if registry.get(name).acts_on == "rotation" and name not in oracles.SCORES:
        rotate, places = getattr(oracles, name), list(range(src_len))
        options = {**options, **params}
        query = rotate(query, places[-tgt_len:], options)
        key = rotate(key, places, {**options, "keys": True})
        name = "none"
    if value is None:
        options = {**options, "inputs": params.get("inputs")}
        return oracles.SCORES[name](query, key, params, options)
    scores = oracles.none(query, key, {}, {})
    allowed = oracles.allowed(case.direction or "both", tgt_len, src_len)
    if name == "shaw_values":
        table = {"value_table": params["table"]}
        return oracles.shaw_values(scores, value, allowed, table, options)
    return oracles.attention(scores, value, allowed)


def _added(case: Case, fixed: Arrays, given: Arrays) -> Tensor:
    """Compute the vectors of an input encoding, ``(B, T, C)``; NaN at padding."""
    tokens, width = fixed["tokens"], case.dims.embed_dim
    if case.item.name == "sentence_learned":
        places = oracles.sentence_positions(tokens, PAD, EOS)
    else:
        places = oracles.block_positions(tokens, PAD)
    if "param.table" in given:
        table = given["param.table"]
    elif case.options.get("layout") == "fairseq":  # it counts from padding_idx + 1
        table = oracles.sinusoidal_half(tokens.size(1) + PAD + 1, width)[PAD + 1 :]
    else:
        table = oracles.sinusoidal(tokens.size(1), width)
    return table[places].masked_fill((places < 0)[..., None], torch.nan)


def meaning(case: Case, arrays: Arrays) -> dict:
    """Collect the facts that a user of the vectors has to know of a case."""
    oracle = getattr(oracles, case.item.name, None)
    return {
        "spec": case.spec,
        "note": case.note,
        "formula": (oracle.__doc__ or "").strip() if oracle else "a table's row for each position",
        "heads": case.heads,
        "head_dim": case.width,
        "max_positions": case.max_positions,
        "options": case.options,
        "direction": case.direction or ("lr" if case.causal else "both"),
        "arrays": {name: list(x.shape) for name, x in arrays.items()},
    }


def _are_there(arrays: Arrays) -> bool:
    """Return whether the file has these, but for last digits, which another processor changes."""
    stored = load_file(ARRAYS) if ARRAYS.exists() else {}
    return stored.keys() == arrays.keys() and all(
        x.shape == stored[name].shape
        and torch.allclose(x, stored[name], rtol=1e-12, atol=1e-12, equal_nan=True)
        for name, x in arrays.items()
    )


def main() -> None:
    """Write all vectors."""
    arrays = {name: arrays_of(case) for name, case in CASES.items()}
    FOLDER.mkdir(exist_ok=True)
    named = {f"{name}/{key}": x for name, group in arrays.items() for key, x in group.items()}
    if not _are_there(named):
        save_file(named, ARRAYS)
    known = {name: meaning(case, arrays[name]) for name, case in CASES.items()}
    MEANING.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
