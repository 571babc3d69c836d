"""A check that a data-bin says where its documents end, for the encoding ``documents``.

Attention stays inside a document; each ``</s>`` ends one, or, with ``end=empty``, each empty line.
"""

import os
from pathlib import Path
from typing import Any

from fairseq.data import data_utils
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask

from fairseq_posenc.errors import UserError
from fairseq_posenc.specs import Spec


def check_document_ends(spec: Spec, task: Any) -> None:
    """Refuse to train on text in which the ends of documents are not marked.

    The task has not loaded data; tasks other than language models pass.

    Raises:
        UserError: a masked LM would not see masked ends, the lines of the training text do not end
            with ``</s>``, or documents end at empty lines and the text has none.
    """
    ends = [
        dict(item.options).get("end", "eos")
        for item in spec.whole_stack
        if item.name == "documents"
    ]
    if not ends or not isinstance(task, (LanguageModelingTask, MaskedLMTask)):
        return
    settings: Any = getattr(task, "cfg", None) or getattr(task, "args", None)
    if isinstance(task, MaskedLMTask) and not settings.include_target_tokens:
        raise UserError(
            "documents: a masked </s> would not end its document; add --include-target-tokens"
        )
    train = Path((settings.data or "").split(os.pathsep)[0]) / "train"
    lines = data_utils.load_indexed_dataset(str(train), task.source_dictionary)
    if not lines:
        return  # there is no training text: other splits are evaluated
    # fairseq-preprocess ends all lines with it or none, so the first one tells.
    if lines[0][-1] != task.source_dictionary.eos():
        raise UserError(f"documents: the lines of {train} do not end with </s>")
    if ends == ["empty"] and not (lines.sizes == 1).any():
        raise UserError(
            f"documents(end=empty): no line of {train} is empty, so no document ends; put an "
            "empty line after each document, or use documents, which ends one at each line"
        )
