"""fairseq's ``from_pretrained`` loads our models, with the plugin by name or by our classes."""

from __future__ import annotations

import re

import pytest

from tests.helpers.commands import FAMILIES, USER_DIR, new_directory, run, trained
from tests.helpers.products import product_of

pytestmark = pytest.mark.slow
CLASSES = {
    "masked_lm": ("fairseq.models.roberta", "RobertaModel"),
    "causal_lm": ("fairseq.models.transformer_lm", "TransformerLanguageModel"),
    "translation": ("fairseq.models.transformer", "TransformerModel"),
}
OWN = {
    "masked_lm": ("fairseq_posenc.models.masked_lm", "PositionalRoberta"),
    "causal_lm": ("fairseq_posenc.models.causal_lm", "PositionalLM"),
    "translation": ("fairseq_posenc.models.translation", "PositionalTransformer"),
}
PROGRAM = """
{}
from {} import {} as Model
hub = Model.from_pretrained({!r}, "checkpoint_last.pt", {!r}{})
tokens = hub.task.source_dictionary.encode_line("w1 w2 w3", add_if_not_exist=False).long()
model = hub.models[0] if hasattr(hub, "models") else hub.model
print(any("position_encoding" in name or "self_attn" in name for name, _ in model.named_modules()))
if hasattr(hub, "generate"):
    print(len(hub.generate(tokens, beam=2)[0]["tokens"]) > 0)
else:
    print(hub.extract_features(tokens).shape[-1] > 0)
"""


@pytest.mark.parametrize(
    ("family", "way"), product_of(FAMILIES, ["name", "path", "imported before", "own class"])
)
def test_from_pretrained(family, way):
    module, name = (OWN if way == "own class" else CLASSES)[family]
    user_dir = {"name": "fairseq_posenc", "path": str(USER_DIR)}.get(way, "fairseq_posenc")
    more = "" if way == "own class" else f", user_dir={user_dir!r}"
    if family == "masked_lm":
        more += ", bpe=None"  # RoBERTa's is GPT-2's, which is fetched
    first = "import fairseq_posenc" if way == "imported before" else ""
    folder, data = trained(family).save_dir, FAMILIES[family].data()
    text = PROGRAM.format(first, module, name, str(folder), str(data), more)
    assert run("python", "-c", text).out.splitlines()[-2:] == ["True", "True"]


def test_the_example_of_the_page():
    page = (USER_DIR.parent / "docs" / "reference" / "fairseq.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```text\n(from fairseq\.models.+?)```", page, re.DOTALL)
    here = new_directory()
    for name, target in {
        "checkpoints/lm": trained("causal_lm").save_dir,
        "checkpoints/m4m": trained("masked_lm").save_dir,
        "data-bin/wiki": FAMILIES["causal_lm"].data(),
    }.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).symlink_to(target)
    done = run("python", "-c", code, cwd=here)
    assert re.search(r"tensor\(\[-(.|\n)*torch.Size\(\[1, 7, ", done.out)
