"""Positions of tokens: with padding on either side, in documents and sentences, in decoding.

B batch, S tokens, of which the last T are the queries. By default the real tokens of a row are
counted from 0: ``<pad> <s> a </s>`` is 0 0 1 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.errors import UserError


def subtract_ids(ids: Tensor, tgt_len: int) -> Tensor:
    """Subtract the ids of the queries, the last T = ``tgt_len``, from those of the keys.

    Ids ``(B or 1, S)`` give ``(B or 1, T, S)``; on several axes, both have one more dimension.
    """
    return ids[:, None] - ids[:, ids.size(1) - tgt_len :, None]


def reading_waits(device: torch.device) -> bool:
    """Check whether reading a tensor's values waits for the device."""
    return device.type != "cpu"


def may_sync(device: torch.device, decoding: bool = False) -> bool:
    """Check whether a forward pass may read values of its tokens to save work.

    Reading waits for a GPU, which a pass can afford once, but not each step of decoding
    (``decoding``). Reading would also break a graph of ``torch.compile``, and a tensor on "meta"
    has no values.
    """
    if torch.compiler.is_compiling() or device.type == "meta":
        return False
    return not (decoding and reading_waits(device))


def refuse_if(is_wrong: Tensor, message: str) -> None:
    """Refuse a call if a bool is true; in a graph or on a GPU torch raises, without a wait."""
    if torch.compiler.is_compiling() or reading_waits(is_wrong.device):
        torch._assert_async(~is_wrong, message)
    elif is_wrong:
        raise UserError(message)


def find_changes(numbers: Tensor) -> Tensor:
    """Mark the elements of ``(B, S)`` that differ from the one before them."""
    return numbers.diff(dim=1, prepend=numbers[:, :1]).ne(0)


def counts_several(ids: Tensor) -> Tensor:
    """Check whether ids ``(B or 1, T)`` count several texts in one row, as a bool ``()``."""
    steps = ids.diff(dim=1)
    counts_or_starts = (steps.eq(1) | ids[:, 1:].eq(0)).all(dim=1)
    return (counts_or_starts & (steps < 0).any(dim=1)).any()


def find_documents(mask: Tensor, numbers: Sequence[Tensor], ids: Tensor | None) -> Tensor:
    """Mark the tokens that begin a document, other than the first one of a row, ``(B, S)``.

    Args:
        mask: 0 for padding, else 1 or the number of the token's document, ``(B, S)``.
        numbers: further numbers of documents, of the last tokens alone, each ``(B, T)``.
        ids: positions of all tokens, ``(B or 1, S)``, which do not grow by one where a document
            begins; None if they are not known.
    """
    tokens = mask.ne(0)
    # Padding takes the number before it: 1 1 0 2 2 as 1 1 1 2 2.
    places = torch.arange(mask.size(1), device=mask.device)
    last = torch.where(tokens, places, 0).cummax(1).values
    found = find_changes(mask.gather(1, last))
    for last_numbers in numbers:
        found[:, -last_numbers.size(1) :] |= find_changes(last_numbers)
    if ids is not None:
        found |= ids.diff(dim=1, prepend=ids[:, :1] - 1).ne(1)
    return found & tokens & (tokens.cumsum(1) > 1)


class Positions(NamedTuple):
    """The positions of a call's tokens. Padding never shifts a token's position.

    >>> padding = torch.tensor([[True, False, False, False], [False, False, False, True]])
    >>> Positions.from_padding(padding, tgt_len=1).ids  # of a step that decodes the last token
    tensor([[0, 0, 1, 2],
            [0, 1, 2, 2]])

    Attributes:
        ids: ``(B or 1, S)``, each token's position among the real tokens of its row, from 0, and
            for padding that of the real token before it, or 0; or what a caller gave instead.
        padding: True for padding, ``(B, S)``; None if no token is.
        ends: True for tokens that end a sentence, as ``</s>``, ``(B, S)``.
        tgt_len: T, the number of queries; they are the last T tokens.
        is_shifted: whether the id of a real token may differ from its index in the row. Padding
            before it is one cause; documents and ids that a caller gives are others.
        longest: the largest position plus 1, or an upper bound on it; None if not known.
        first: result of :meth:`is_first` if documents' or a caller's ids do not show it; else None.
        document_starts: ``(B, S)``, the number of real tokens before each token's document, if
            documents were looked for; ``ids`` count from there, unless a caller gave them.
        drawn: random numbers that tables and rotations use instead of ``ids``, drawn last (by
            ``randomized``); None for ``ids``. Like these, they ascend if the tokens are counted.
        counted: whether ``ids`` count the tokens; ids that a caller gives may repeat.
        consecutive: whether ``ids`` grow by one from token to token of a document, so that
            their differences equal those of the tokens' indices.
    """

    ids: Tensor
    padding: Tensor | None
    ends: Tensor
    tgt_len: int
    is_shifted: bool
    longest: int | None
    first: Tensor | None = None
    document_starts: Tensor | None = None
    drawn: Tensor | None = None
    counted: bool = True
    consecutive: bool = True

    @classmethod
    def from_tokens(cls, tokens: Tensor, padding_idx: int, eos_idx: int, tgt_len: int) -> Positions:
        """Number the real tokens of ``tokens``, ``(B, S)``, with padding on either side.

        ``padding_idx`` is the symbol of padding, ``eos_idx`` the one that ends a sentence.
        """
        return cls.from_padding(tokens.eq(padding_idx), tgt_len)._replace(ends=tokens.eq(eos_idx))

    @classmethod
    def from_padding(cls, padding: Tensor, tgt_len: int | None = None) -> Positions:
        """Number tokens by their padding alone, without ends of sentences.

        Where values must not be read (:func:`may_sync`), every row is treated as if it may be
        padded on the left; positions are the same.

        Args:
            padding: True for padding, ``(B, S)`` of bool.
            tgt_len: T; by default S.
        """
        real, src_len = ~padding, padding.size(1)
        ids = (real.cumsum(1) - 1).clamp(min=0)  # [B, S]
        ends = torch.zeros_like(padding)
        tgt_len = src_len if tgt_len is None else tgt_len
        if not may_sync(padding.device, decoding=tgt_len < src_len):
            return cls(ids, padding, ends, tgt_len, is_shifted=True, longest=src_len)
        indices = torch.arange(src_len, device=padding.device).unsqueeze(0)  # [1, S]
        shifted = real & ids.ne(indices)  # by padding before them
        count = ids.amax() + 1 if padding.numel() else ids.sum()  # else 0, on the same device
        # One tensor, so that a GPU is waited for once.
        padded, is_shifted, longest = torch.stack([padding.any(), shifted.any(), count]).tolist()
        if not padded:
            return cls(indices, None, ends, tgt_len, is_shifted=False, longest=longest)
        return cls(ids, padding, ends, tgt_len, bool(is_shifted), longest)

    def real(self) -> Tensor:
        """Mark the tokens that are not padding, ``(B, S)``."""
        return torch.ones_like(self.ends) if self.padding is None else ~self.padding

    def split_documents(self, empty: bool, causal: bool) -> Positions:
        """Restart positions in each document, by the ends of sentences.

        Args:
            empty: whether documents end at an empty sentence, the second of two ends in a row:
                ``a </s> b </s> </s> c`` has two documents. Otherwise every end ends a document.
            causal: whether the end is the first token of the next document (``</s> c``). Otherwise
                it is the last one of its own, and the next document is ``c``.
        """
        if self.document_starts is not None:  # already split, perhaps at other tokens
            return self
        begins = self.ends & _shift_right(self.ends) if empty else self.ends
        return self.begin_documents(begins if causal else _shift_right(begins))

    def replace_ids(self, ids: Tensor, name: str = "position_ids") -> Positions:
        """Replace the position of each token by a caller's ids, ``(B or 1, S)``.

        Args:
            ids: whole numbers, or real ones; on several axes ``(B or 1, S, axes)``.
            name: of the ids, for errors.

        Raises:
            UserError: an id is below 0 or not finite; not where ids must not be read (a graph).
        """
        ids = ids.float() if ids.is_floating_point() else ids.long()
        if (padding := self.padding) is not None:
            ids = ids.masked_fill(padding[..., None] if ids.dim() == 3 else padding, 0)
        longest: int | None = None
        consecutive = False
        # If the ids must not be read, the bounds check of a table finds those without a row.
        if may_sync(ids.device, decoding=self.tgt_len < ids.size(1)) and ids.numel():
            least, most = ids.aminmax()
            # Ids on several axes have no single distance, so they are never consecutive.
            grow = self._grow_by_one(ids).all() if ids.dim() == 2 else torch.zeros_like(least)
            least, most, consecutive = torch.stack([least, most, grow.to(ids.dtype)]).tolist()
            if least < 0:
                raise UserError(f"{name}: {least} is below 0; positions count from 0")
            if not most < torch.inf:  # `most` is NaN if any id is
                raise UserError(f"{name}: {most} is not finite; positions must be")
            longest = int(most) + 1
        return self._replace(
            ids=ids,
            is_shifted=True,
            first=self.is_first(),  # by the counted ids, before these replace them
            drawn=None,
            longest=longest,
            counted=False,
            consecutive=bool(consecutive),
        )

    def _grow_by_one(self, ids: Tensor) -> Tensor:
        """Mark the ids, ``(B or 1, S)``, that equal the document's first id plus the tokens since.

        Padding is marked, too.
        """
        indices = torch.arange(ids.size(1), device=ids.device)
        indices, ids, first = torch.broadcast_tensors(indices, ids, self.is_first())  # [B or 1, S]
        first_index = torch.where(first, indices, 0).cummax(1).values  # of the token's document
        grows = (ids - ids.gather(1, first_index)).eq(indices - first_index)
        return grows if self.padding is None else grows | self.padding

    def distances(self) -> Tensor:
        """List the distances of keys from queries by their indices, ``(R,)``, int64.

        >>> padding = torch.zeros(1, 4, dtype=torch.bool)
        >>> Positions.from_padding(padding, tgt_len=2).distances()  # of the last 2 of 4 tokens
        tensor([-3, -2, -1,  0,  1])
        """
        return torch.arange(1 - self.src_len, self.tgt_len, device=self.device)

    def begin_documents(self, begins: Tensor) -> Positions:
        """Restart positions, none of them drawn yet, where documents begin: ``(B, S)`` of bool."""
        real = self.real()
        ids = self.ids.expand_as(real)  # [B, S]
        # `begins` may mark padding. Then the next real token begins the document: the first one of
        # a later document than the real token before it.
        #   tokens     a  b  <pad>  c  d
        #   begins     0  0    1    0  0
        #   document   0  0    1    1  1
        #   before     0  0    0    0  1
        document = begins.cumsum(1)  # [B, S]
        before = _shift_right(document.masked_fill(~real, 0).cummax(1).values)
        real_begins = real & (document > before)
        starts = torch.where(real_begins, ids, 0).cummax(1).values
        first = real_begins | (real & real.cumsum(1).eq(1))
        return self._replace(ids=ids - starts, is_shifted=True, first=first, document_starts=starts)

    @property
    def batch_size(self) -> int:
        """B, the number of rows."""
        return self.ends.size(0)

    @property
    def src_len(self) -> int:
        """S, the number of all tokens of a row."""
        return self.ends.size(1)

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""
        return self.ends.device

    def last_ids(self, count: int) -> Tensor:
        """Select the last ``count`` positions for tables and rotations, ``drawn`` or ``ids``."""
        ids = self.ids if self.drawn is None else self.drawn
        return ids[:, ids.size(1) - count :]

    @property
    def query_ids(self) -> Tensor:
        """The positions of the queries that tables and rotations use."""
        return self.last_ids(self.tgt_len)

    def queries(self, x: Tensor) -> Tensor:
        """Select the queries' part of ``x``, ``(B or 1, S, ...)``: ``(B or 1, T, ...)``."""
        return x[:, x.size(1) - self.tgt_len :]

    def compact_ids(self, limit: int | None = None) -> Tensor:
        """Return ``ids`` or, if one row ``(1, S)`` serves all sentences, that row: less to compute.

        One row suffices if ids are indices. It also counts padding on the right, but stays below
        ``limit``, the rows of a table. Other ids stay: one beyond the table must fail there.
        """
        if self.is_shifted or self.padding is None:
            return self.ids
        indices = torch.arange(self.src_len, device=self.device).unsqueeze(0)
        return indices if limit is None else indices.clamp(max=limit - 1)

    def check_limit(self, limit: int, name: str) -> None:
        """Refuse positions beyond the table of an encoding, which has ``limit`` rows."""
        if self.longest is None or self.longest <= limit:
            return  # if not known, the table's own bounds check refuses
        longest = int(self.ids.max()) + 1  # exact: the field may be a bound; this waits for a GPU
        if longest > limit:
            what = f"a sequence of {longest} tokens" if self.counted else f"position {longest - 1}"
            raise UserError(
                f"{what} is {'longer than' if self.counted else 'beyond'} the {limit} "
                f"positions of {name!r}: raise max_positions (of a translation model "
                "max_source_positions, max_target_positions; in transformers set_positions(model, "
                "'own', max_positions=...)) before training, or shorten the input"
            )

    def sentence_ids(self) -> Tensor:
        """Number tokens from 1 in each sentence, ``(B, S)``.

        The first token of a row, its ``<s>``, is at 0: ``<s> a b c </s> d e </s>`` is
        0 1 2 3 4 1 2 3. No number is higher than the token's position in ``ids``.

        Source: the "real absolute positions" of Huang et al. (2021), section 5.2.
        """
        real, ids = self.real(), self.ids.expand_as(self.ends)  # [B, S]
        before = _shift_right(ids)
        restarts = real & (ids < before)  # ids fall where a document, or a caller, restarts them
        if self.document_starts is not None:
            restarts = restarts | find_changes(self.document_starts)
        begins = restarts | _shift_right(self.ends)
        indices = torch.arange(self.src_len, device=self.device)
        first_index = torch.where(begins, indices, 0).cummax(1).values  # of the token's sentence
        last_end = torch.where(restarts, 0, before).gather(1, first_index)  # id before the sentence
        numbers = ids - last_end
        return torch.where(real, numbers, numbers.clamp(min=0))  # any row of a table for padding

    def is_first(self) -> Tensor:
        """Mark the first real token of each row, or of each document if rows have several.

        The result is ``(B or 1, S)`` of bool; it is a single row for all if ids are indices.
        """
        if self.first is not None:
            return self.first
        if not self.is_shifted:
            return torch.eye(1, self.src_len, dtype=torch.bool, device=self.device)  # True at 0
        real = self.real()
        return real & real.cumsum(1).eq(1)


def _shift_right(x: Tensor) -> Tensor:
    """Give each token of ``(B, S)`` the value of the token before it, and the first one 0."""
    return F.pad(x, (1, 0))[:, :-1]
