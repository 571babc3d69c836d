"""A RoBERTa of transformers becomes a checkpoint of fairseq; what fairseq cannot have is refused.

Exports have fairseq's layout already: token types, padding rows and a changed configuration are
met here alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.helpers.commands import new_directory, refused
from tests.helpers.exchanged import import_from
from tests.workbench.convert.test_export import compare, open_checkpoint


def make_roberta(kind: str = "Roberta", types: int = 1) -> tuple[Any, Path]:
    """Make a random model of transformers, and the folder that it is in."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 40, "vocab_size": 60}
    sizes |= {"max_position_embeddings": 34, "num_attention_heads": 4, "type_vocab_size": types}
    config = getattr(transformers, f"{kind}Config")(**sizes, layer_norm_eps=1e-5, pad_token_id=1)
    model = getattr(transformers, f"{kind}ForMaskedLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    folder = new_directory() / "roberta"
    model.save_pretrained(folder)
    (folder / "dict.txt").write_text("".join(f"x{number} 1\n" for number in range(55)))
    return model, folder


@pytest.mark.parametrize("kind", ["Roberta", "XLMRoberta"])
@pytest.mark.parametrize("types", [1, 2])
def test_a_roberta_of_transformers_computes_the_same_in_fairseq(kind, types):
    model, folder = make_roberta(kind, types)
    compare(open_checkpoint(import_from(folder)), model, longest=32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps is 1e-12, and fairseq's is 1e-05"),
        ({"hidden_act": "relu"}, "RobertaForMaskedLM differs from fairseq's model by"),
        ({"num_hidden_layers": 3}, "the weights lack"),
        (None, "dict.txt: has 6 symbols, and the model 60"),
        ("llama", "a LlamaForCausalLM cannot be imported: only RoBERTa"),
        ("nowhere", "no such folder"),
    ],
)
def test_what_fairseq_does_not_have_is_refused(change, message, capsys):
    _, folder = make_roberta()
    path = folder / "config.json"
    if change is None:
        (folder / "dict.txt").write_text("x 1\n")
    elif change == "llama":
        sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
        config = transformers.LlamaConfig(**sizes, vocab_size=9, intermediate_size=8)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    elif change == "nowhere":
        folder /= change
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    out = new_directory() / "start.pt"
    assert message in refused(capsys, "import", "--from", folder, "--out", out)
    assert not out.exists()
