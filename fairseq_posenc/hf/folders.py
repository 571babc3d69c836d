"""Loads models and tokenizers of folders of transformers, which may be somebody else's."""

import re
from pathlib import Path
from typing import Any, cast

import transformers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.hf.derived import derive
from fairseq_posenc.hf.folder_checks import check_folder, readable_errors, refuse_changed
from fairseq_posenc.hf.record import refuse_other_weights
from fairseq_posenc.hf.saving import CLASS_PREFIX, ConfigWithPositions, ModelWithPositions

# Heads of other tasks, which a class of models leaves out.
_OTHER_HEADS = re.compile(
    r"(^|\.)(cls|pooler|lm_head|classifier|qa_outputs|score|discriminator\w*)\."
)


def load_model(folder: Path, **settings: Any) -> PreTrainedModel:
    """Load the model of a folder, stock or with positions, as the class that the folder names.

    Args:
        folder: the folder.
        settings: options of ``from_pretrained``.

    Raises:
        UserError: the folder is refused or cannot be read, or its weights are not the model's.
    """
    identities = check_folder(folder)
    transformers.logging.set_verbosity_error()  # what it would report about weights is an error
    with readable_errors(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model, info = _find_class(config).from_pretrained(
            folder,
            config=config,
            trust_remote_code=False,
            disable_mmap=True,  # a mapped file that is written ends the process (SIGBUS)
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the info lists them; checked below
            **settings,
        )
        refuse_changed(identities)
        unexpected = [name for name in info["unexpected_keys"] if not _OTHER_HEADS.search(name)]
        refuse_other_weights(info["missing_keys"], unexpected, info["mismatched_keys"])
        parameters = model.named_parameters()
        if names := [name for name, weight in parameters if not bool(weight.isfinite().all())]:
            raise UserError(f"the weights are not finite: {shortened(', '.join(names))}")
    return cast(PreTrainedModel, model)


def _find_class(config: Any) -> Any:
    """Find the model class that a configuration names."""
    name = str(next(iter(config.architectures or ()), "")).removeprefix(CLASS_PREFIX)
    model_class = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise UserError(
            f"its config.json names the class {shortened(name)}, which transformers does not have"
        )
    is_stock = not isinstance(config, ConfigWithPositions)
    return model_class if is_stock else derive(model_class, (ModelWithPositions,))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder; refuse one that runs code or cannot be read."""
    if not any(re.match("tokenizer|vocab|spiece|sentencepiece", x.name) for x in folder.iterdir()):
        raise UserError(f"{folder}: has no tokenizer, which --text needs: save the model's there")
    with readable_errors(folder, "its tokenizer, which --text needs,"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return cast(PreTrainedTokenizerBase, tokenizer)


def check_ids(folder: Path, ids: Tensor, model: PreTrainedModel) -> None:
    """Refuse tokens for which a model has no embedding: its tokenizer is another model's."""
    largest, rows = int(ids.max()), model.get_input_embeddings().weight.size(0)
    if largest >= rows:
        raise UserError(f"{folder}: its tokenizer has the id {largest}, its model {rows} tokens")
