"""What two models have of the same kind, one less the other."""

from __future__ import annotations

from collections.abc import Sequence

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots.attention import Maps
from fairseq_posenc.workbench.plots.tables import Table


def tables_less(tables: Sequence[Table], others: Sequence[Table]) -> list[Table]:
    """Return tables less those of another model.

    Raises:
        UserError: the models have other tables, or of other sizes.
    """
    ours, theirs = (
        [f"{table.title} ({' x '.join(map(str, table.values.shape))})" for table in each]
        for each in (tables, others)
    )
    if ours != theirs:
        raise UserError(
            f"the models have other tables: {'; '.join(ours)} and {'; '.join(theirs)}: choose two "
            "with the same positions and sizes"
        )
    return [
        table._replace(values=table.values - other.values) for table, other in zip(tables, others)
    ]


def maps_less(maps: Maps, others: Maps) -> Maps:
    """Return attention less that of another model to the same tokens.

    Raises:
        UserError: the models have other heads, or read other tokens.
    """
    if (maps.queries, maps.keys) != (others.queries, others.keys):
        raise UserError("the models cut the text into other tokens: choose two of one dictionary")
    return maps._replace(weights=maps.weights - others.weights, hidden=maps.hidden & others.hidden)
