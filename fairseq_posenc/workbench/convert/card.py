"""Writes the card (README.md) of an exported model."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from huggingface_hub import ModelCardData

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.loading.checkpoints import read_updates
from fairseq_posenc.workbench.loading.open_model import OpenModel
from fairseq_posenc.workbench.results.markdown import code, table

LONGEST_TRANSLATION = 200  # tokens that fairseq-generate writes at most, without </s>
_CARD = """---
{labels}
---

# {title}

Trained with [fairseq](https://github.com/facebookresearch/fairseq) and fairseq-posenc, and written
by {command} of version {version}. Run the lines in this folder.

{rows}

```python
{usage}
```

{notes}
"""
_SERVE = """import ctranslate2
from tokenizers import Tokenizer

source = Tokenizer.from_file("tokenizer.json")
target = Tokenizer.from_file("{target}")
pieces = source.encode("{prompt}", add_special_tokens=False).tokens
engine = ctranslate2.{engine}(".")
(result,) = engine.{call}
print(target.decode([target.token_to_id(piece) for piece in result.{written}[0]]))"""
_PROMPTS = {"causal_lm": "A man is sleeping.", "translation": "Un homme dort."}
# Head of a model -> its Auto class, and the name of transformers' pipeline for it, if there is one.
_HEADS = {
    "masked_lm": ("AutoModelForMaskedLM", "fill-mask"),
    "classes": ("AutoModelForSequenceClassification", "text-classification"),
    "spans": ("AutoModelForQuestionAnswering", None),
    "causal_lm": ("AutoModelForCausalLM", "text-generation"),
    "translation": ("AutoModelForSeq2SeqLM", None),
}


def format_usage(trained: OpenModel, imports: Sequence[str], tokenizers: Sequence[str]) -> str:
    """Format Python lines that load an exported model, and write text with it if it generates.

    Args:
        trained: the model.
        imports: modules that transformers needs to load its positions; none for its own classes.
        tokenizers: folders of its tokenizers inside the model's folder, the source's first.
    """
    auto, _ = _HEADS[trained.head]
    lines = [f"import {x}  # installed, or in PYTHONPATH: has its positions" for x in imports]
    lines += [f"from transformers import {auto}, AutoTokenizer", ""]
    names = ("tokenizer", "target")[: len(tokenizers)]
    for name, folder in zip(names, tokenizers):
        lines.append(f'{name} = AutoTokenizer.from_pretrained("{Path(".", folder)}")')
    lines.append(f'model = {auto}.from_pretrained(".")')
    if names and trained.head in ("causal_lm", "translation"):
        # The folder of a translation model has its limit, in generation_config.json.
        limit = "" if trained.head == "translation" else ", max_new_tokens=20"
        lines += [
            f'inputs = tokenizer(["{_PROMPTS[trained.head]}"], return_tensors="pt")',
            f"written = model.generate(**inputs{limit})",
            f"print({names[-1]}.batch_decode(written, skip_special_tokens=True))",
        ]
    return "\n".join(lines)


def format_serving_usage(trained: OpenModel, tokenizers: Sequence[str]) -> str:
    """Format Python lines that run a model with CTranslate2; arguments: :func:`format_usage`."""
    if not tokenizers:
        return "# This folder has no tokenizer."
    if trained.head == "causal_lm":
        engine, written = "Generator", "sequences"
        start = "<s>" if trained.settings.task.get("add_bos_token") else "</s>"
        call = f'generate_batch([["{start}", *pieces]], max_length=50, sampling_topk=10)'
    else:  # translation
        engine, written = "Translator", "hypotheses"
        # Neither limit counts the last </s>; to write n tokens and it, the decoder reads n + 1.
        longest = min(LONGEST_TRANSLATION, trained.stacks["decoder"].max_positions() - 1)
        call = f"translate_batch([pieces], beam_size=5, max_decoding_length={longest})"
    target, prompt = Path(tokenizers[-1], "tokenizer.json"), _PROMPTS[trained.head]
    return _SERVE.format(target=target, prompt=prompt, engine=engine, call=call, written=written)


def write_card(
    folder: Path, trained: OpenModel, library: str, usage: str, notes: Sequence[str]
) -> None:
    """Write README.md into the folder of an exported model.

    Args:
        folder: the folder.
        trained: the model.
        library: ``transformers`` or ``ctranslate2``.
        usage: Python lines that load or run the export.
        notes: lines about the comparison and about parts that are missing.
    """
    task = trained.settings.task
    labels = ModelCardData(  # what the hub reads of the card
        language=[task.source_lang, task.target_lang] if trained.head == "translation" else None,
        library_name=library,
        pipeline_tag=_HEADS[trained.head][1],
        tags=["fairseq", "position-encoding"],
    )
    stacks = trained.stacks.items()
    rows = [
        *((f"positions, {side}", code(stack.identity.describe())) for side, stack in stacks),
        ("parameters", f"{sum(x.numel() for x in trained.model.parameters()):,}"),
        ("data", code(trained.data.resolve().name)),
        ("updates", f"{read_updates(trained.state):,}"),
    ]
    text = _CARD.format(
        labels=labels.to_yaml(),
        title=code(trained.path.resolve().parent.name or trained.path.stem),
        version=__version__,
        command=code(f"fairseq-posenc export --checkpoint {quote(trained.path.name)}"),
        rows=table(("", ""), rows, align="l"),
        usage=usage,
        notes="\n".join(f"- {note}" for note in notes),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
