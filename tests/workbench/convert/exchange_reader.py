"""What a user of transformers does with a folder: run by a Python that may know nothing of fairseq.

``python exchange_reader.py ASKED ANSWERS``: both files are torch's. ASKED is a list of folders,
each with a dictionary: the name of an ``AutoModelFor...`` and what to compute.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
import transformers


def load(folder: str, auto: str) -> tuple[Any, dict[str, Any]]:
    """Load a folder by the name of an ``AutoModelFor...``; every weight must be there.

    Returns:
        The model, and what is known of it: the version of transformers and the class.
    """
    model, info = getattr(transformers, auto).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    assert not any(info[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched")), info
    return model.eval(), {"version": transformers.__version__, "class": type(model).__name__}


def answer(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Run transformers on a folder.

    Args:
        folder: of an export.
        asked: ``auto``, and as wanted ``inputs`` (of forward), ``generate`` (arguments of it),
            ``texts`` (to encode, to decode again, and to fill masks in).
    """
    model, found = load(folder, asked["auto"])
    with torch.no_grad():
        if "inputs" in asked:
            output = model(**asked["inputs"])
            if "logits" in output:
                found["scores"] = output.logits
            else:
                found["spans"] = (output.start_logits, output.end_logits)
        if "generate" in asked:
            found["generated"] = [model.generate(**each) for each in asked["generate"]]
    if "texts" in asked:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        sentences = (
            zip(*asked["texts"]) if isinstance(asked["texts"][0], list) else [asked["texts"]]
        )
        found["ids"] = tokenizer(*map(list, sentences))["input_ids"]
        found["decoded"] = [tokenizer.decode(i, skip_special_tokens=True) for i in found["ids"]]
        found["specials"] = {
            name: tokenizer.convert_tokens_to_ids(token)
            for name, token in tokenizer.special_tokens_map.items()
        }
    if "fill" in asked:
        pipe = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)
        found["filled"] = [[each["token"] for each in pipe(text)] for text in asked["fill"]]
    return found


if __name__ == "__main__":
    for name in ("fairseq", "fairseq_posenc"):
        assert importlib.util.find_spec(name) is None, f"{name} is there, which proves nothing"
    asked, answers = sys.argv[1:]
    torch.set_num_threads(1)
    torch.save([answer(folder, each) for folder, each in torch.load(asked)], answers)
