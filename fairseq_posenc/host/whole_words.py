"""Makes ``--mask-whole-words`` work for fairseq's task ``masked_lm``.

The task reads the options of ``--bpe`` from ``task.args``. It has had no such attribute since its
options became a dataclass, so the option failed with an AttributeError.
"""

from typing import Any

from fairseq.data.encoders import BPE_REGISTRY

from fairseq_posenc.errors import UserError


def prepare_whole_words(task: Any, bpe: Any) -> None:
    """Give a task that masks whole words the options of ``--bpe``, which splits words into pieces.

    Args:
        task: the task; it is changed only if it masks whole words.
        bpe: the name of ``--bpe``, or fairseq's section of this name.

    Raises:
        UserError: ``--bpe`` is missing, or its pieces do not show where a word begins.
    """
    if not getattr(getattr(task, "cfg", None), "mask_whole_words", False):
        return
    name = bpe if isinstance(bpe, str) else getattr(bpe, "_name", None)
    known = [key for key, kind in BPE_REGISTRY.items() if hasattr(kind, "is_beginning_of_word")]
    if name not in known:
        reason = f"--bpe {name} does not show" if name else "without --bpe fairseq does not know"
        raise UserError(
            f"--mask-whole-words: {reason} where a word begins, and would mask single pieces; give "
            f"the --bpe that the data were made with, and its files: one of {', '.join(known)}"
        )
    task.args = bpe
