"""Exports a trained model of fairseq as a folder of transformers.

The folder has a stock class of transformers with the positions of the checkpoint, a tokenizer, the
settings of ``generate`` and a card. It gets its name once its model was loaded and compared with
the trained one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from fairseq_posenc.folders import whole_folder
from fairseq_posenc.hf.saving import load_model
from fairseq_posenc.workbench.convert.card import Labels, format_usage, write_card
from fairseq_posenc.workbench.convert.comparison import (
    compare_with_transformers,
    refuse_difference,
)
from fairseq_posenc.workbench.convert.to_transformers import (
    build_stock_model,
    find_stock_family,
    has_own_positions,
)
from fairseq_posenc.workbench.convert.tokenizer import TARGET, write_tokenizers
from fairseq_posenc.workbench.loading.open_model import OpenModel


def export(trained: OpenModel, tokens: str | None, out: Path, labels: Labels) -> list[str]:
    """Write a folder of transformers, and compare its model with the trained one.

    Args:
        trained: the model.
        tokens: value of ``--tokens``; None to find a tokenizer in the folder of the data.
        out: the folder.
        labels: labels of the model card.

    Returns:
        Lines for the user: the class, and notes.

    Raises:
        UserError: the models differ, or transformers has no such model.
    """
    stock = find_stock_family(trained)
    name = stock.classes[trained.head]
    with whole_folder(out) as folder:
        notes = write_tokenizers(trained, tokens, folder)
        for dictionary in trained.dictionaries:
            (folder / dictionary).parent.mkdir(exist_ok=True)
            shutil.copyfile(trained.data / dictionary, folder / dictionary)
        is_plain = has_own_positions(trained, stock)
        build_stock_model(trained, stock, is_plain=is_plain).save_pretrained(folder)
        for file in filter(
            Path.is_file, folder.rglob("*")
        ):  # safetensors keeps others from reading
            file.chmod((folder / "config.json").stat().st_mode)
        written = load_model(folder).eval()
        difference = compare_with_transformers(trained.model, trained.head, written)
        refuse_difference(f"{name} differs from the model", difference)
        notes.append(f"scores equal to {difference:.1e} of the largest one, on padded sentences")
        target = TARGET if (folder / TARGET).is_dir() else None
        usage = format_usage(trained, is_plain, target)
        write_card(folder, trained, "transformers", usage, notes, labels)
    positions = "its own positions" if is_plain else "positions of fairseq-posenc"
    return [f"wrote {out}: {name} with {positions}", *notes]
