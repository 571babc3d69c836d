"""``--mask-whole-words``: made to work for the task ``masked_lm``.

fairseq's task looks for the options of ``--bpe`` in ``task.args``, which it has not had since its
options became dataclasses; so the option ended in an AttributeError.
"""

from __future__ import annotations

from typing import Any

from fairseq.data.encoders import BPE_REGISTRY

from fairseq_posenc.errors import UserError


def prepare_whole_words(task: Any, bpe: Any) -> None:
    """Give a task the options of the pieces that its words are made of.

    Only a task that masks whole words is changed. ``bpe`` is fairseq's section of that name.

    Raises:
        UserError: the pieces are not known, or do not show where a word begins.
    """
    if not getattr(getattr(task, "cfg", None), "mask_whole_words", False):
        return
    name = bpe if isinstance(bpe, str) else getattr(bpe, "_name", None)
    known = [key for key, kind in BPE_REGISTRY.items() if hasattr(kind, "is_beginning_of_word")]
    if name not in known:
        given = f"--bpe {name} does not show" if name else "without --bpe fairseq does not know"
        raise UserError(
            f"--mask-whole-words: {given} where a word begins, and would mask single pieces; give "
            f"the --bpe that the data were made with, and its files: one of {', '.join(known)}"
        )
    task.args = bpe
