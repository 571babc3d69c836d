"""Makes terms of numbers and tensors by the names of the terms, so that forms are short."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, get_args

import torch

from fairseq_posenc.backends import BACKENDS
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.encodings import term as kinds
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import Mask

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value
ROWS = {kinds.RowsByDistance(torch.ones(1), of=x).name: x for x in get_args(kinds.RowsOf)}
TABLES = {"bias", "gain", *ROWS}
OTHERS: dict[str, Any] = {x.label: x for x in kinds.Term.__subclasses__() if hasattr(x, "label")}


def terms_of(runs: Runs | None = None, product: bool = False, **given: Any) -> Terms:
    """Return the terms of tensors, numbers, or tuples of them; leave out None and False."""
    terms: list[kinds.Term] = []
    for name, x in given.items():
        if x is None or x is False:
            continue
        if name in ROWS:
            of, multiplies = ROWS[name], product and name in ("query_table", "key_table")
            terms.append(kinds.RowsByDistance(x, runs, of=of, multiplies=multiplies))
        elif name in TABLES:
            terms.append(kinds.NumbersByDistance(x, runs, multiplies=name == "gain"))
        else:
            fields = () if x is True else x if isinstance(x, tuple) else (x,)
            terms.append(OTHERS[name](*fields))
    return Terms(terms)


def terms_of_groups(
    form: dict[str, Any], rows: int, width: int, leaf: Callable[..., Any], runs: Runs | None = None
) -> Terms:
    """Return terms whose tables, which ``leaf`` draws, have as many groups as a form says."""
    given: dict[str, Any] = {}
    for name, groups in form.items():
        if name == "shared":  # a table of queries and of keys
            given["key_table"] = given["query_table"]
        elif name in ROWS:
            given[name] = leaf(groups, rows if runs is None else runs.num_rows, width)
        else:
            given[name] = leaf(groups, rows) if name in TABLES else groups
    rows_of = kinds.RowsByDistance
    return Terms(replace(x, runs=runs) if isinstance(x, rows_of) else x for x in terms_of(**given))


def draft_call(
    terms: Terms = Terms([]),  # noqa: B008  (immutable)
    device: str = "cpu",
    tgt_len: int = 512,
    src_len: int = 512,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    **others: Any,
) -> AttentionCall:
    """Return a call without values, for which a backend is chosen; "meta" stands for a GPU."""
    query = torch.empty(1, 1, tgt_len, head_dim, dtype=dtype, device=device)
    key = query.new_empty(1, 1, src_len, head_dim)
    return AttentionCall(query, key, key, terms, **others)


def whole_call(layer, state, query, key, value, x: torch.Tensor | None = None) -> AttentionCall:
    """Return a layer's call for all keys, which it has projected; ``x`` is its input."""
    terms, mask = layer.compute_terms(state), state.mask.with_direction(layer.direction)
    terms = terms if x is None else terms | layer.encodings.input_terms(x, state.positions)
    query, key = layer.rotate_tokens(query, key, state)
    return AttentionCall(query, key, value, terms, mask)


def change_terms(terms: Terms, **changes: Any) -> Terms:
    """Replace terms of some names, or leave them out."""
    return Terms([*(x for x in terms if x.name not in changes), *terms_of(**changes)])


def with_tensors(terms: Terms, tensors: Iterable[torch.Tensor]) -> Terms:
    """Replace the tensors, in the order of ``Terms.tensors``."""
    remaining = iter(tensors)
    return terms.map(lambda _: next(remaining))


def leaves_of(terms: Terms) -> list[torch.Tensor]:
    """List the tensors that learn, each once."""
    return list({id(x): x for x in terms.tensors().values() if x.requires_grad}.values())


def assert_equals_reference(
    name: str, terms: Terms, mask: Mask, qkv: Inputs, tolerance: float = 1e-9, whole: Any = None
) -> None:
    """Assert that outputs and, ten times less exactly, all gradients are the reference's.

    ``whole``: another form of the terms, with the same leaves, for the reference.
    """
    whole = terms if whole is None else whole
    ours, _ = BACKENDS[name].attend(AttentionCall(*qkv, terms, mask))
    theirs, _ = BACKENDS["reference"].attend(AttentionCall(*qkv, whole, mask))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    weight, leaves = torch.randn_like(ours), [*qkv, *leaves_of(terms)]
    found, expected = (torch.autograd.grad((x * weight).sum(), leaves) for x in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=10 * tolerance, atol=10 * tolerance)
