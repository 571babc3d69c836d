"""A folder that CTranslate2 serves, made of a trained model."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.convert.exchange.card import Labels, card
from fairseq_posenc.workbench.convert.exchange.config_json import generation
from fairseq_posenc.workbench.convert.exchange.ctranslate2.comparison import (
    LogProbDifference,
    difference,
)
from fairseq_posenc.workbench.convert.exchange.ctranslate2.specification import specification
from fairseq_posenc.workbench.convert.exchange.ctranslate2.text import TextSide, write_sides
from fairseq_posenc.workbench.convert.exchange.hf_folder_writer import create_folder
from fairseq_posenc.workbench.convert.random_comparison import ALLOWED
from fairseq_posenc.workbench.loading.open_model import OpenModel

_TRANSLATION = """translator = ctranslate2.Translator("FOLDER")
(found,) = translator.translate_batch(
    [{cut}],
    beam_size=5, max_decoding_length={longest}, return_end_token=True,
)
translation = [each for each in found.hypotheses[0] if each != "</s>"]
print({joined})"""
_CAUSAL_LM = """generator = ctranslate2.Generator("FOLDER")
(found,) = generator.generate_batch(
    [["{start}", *{cut}]], max_length=50, sampling_topk=10
)
print({joined})"""


def serve(
    trained: OpenModel, quantization: str, given: str | None, out: Path, labels: Labels
) -> list[str]:
    """Write a folder that CTranslate2 reads, and compare the two models.

    Args:
        trained: the model.
        quantization: of the weights: ``float32``, ``float16`` or ``int8``.
        given: value of ``--tokens``; None to search the folder of the data.
        out: the folder.
        labels: license and languages for the model card.

    Returns:
        Lines for the user.

    Raises:
        UserError: CTranslate2 cannot compute the model, or computes something else.
    """
    if trained.head not in ("translation", "causal_lm"):
        raise UserError(
            f"--to ctranslate2: for translation models and causal LMs, and {trained.path} is "
            "neither: --to hf or --to onnx"
        )
    with create_folder(out) as folder:
        sides = write_sides(trained, given, folder)
        vocabularies = [side.symbols for side in sides]
        with TemporaryDirectory() as place:
            exact = _write(trained, vocabularies, "float32", Path(place))
        if exact.largest > ALLOWED:
            raise UserError(
                f"--to ctranslate2: log probabilities differ from the model's by "
                f"{exact.largest:.1e} of the largest one, and {ALLOWED:g} is rounding: nothing was "
                "written"
            )
        written = _write(trained, vocabularies, quantization, folder)
        notes = [f"log probabilities in float32 equal to {exact.largest:.1e} of the largest one"]
        if quantization != "float32":
            notes.append(
                f"log probabilities in {quantization} are {written.mean:.1e} from those of float32 "
                "in the mean, of random text"
            )
        if not sides[0].file:
            notes.append("no tokenizer")
        text = card(trained, "ctranslate2", _usage(trained, sides), notes, labels)
        (folder / "README.md").write_text(text, encoding="utf-8")
    return [f"wrote {out}: a model of CTranslate2 in {quantization}", *notes]


def _write(
    trained: OpenModel, vocabularies: list[list[str]], quantization: str, folder: Path
) -> LogProbDifference:
    """Write the model and its vocabularies; compare what CTranslate2 reads."""
    spec = specification(trained, vocabularies)
    spec.optimize(quantization)
    spec.save(str(folder))
    return difference(trained, folder, vocabularies)


def _usage(trained: OpenModel, sides: list[TextSide]) -> str:
    """Return lines of Python that need CTranslate2 and what cuts the text."""
    source, target = sides[0], sides[-1]
    library, opening, cutting, joining = source.usage
    names = ("source", "source" if source.file == target.file else "target")
    lines = ["import ctranslate2", library, ""] if library else ["import ctranslate2", ""]
    if source.file:
        lines += [
            f"{name} = {opening.format(file=side.file)}"
            for name, side in dict(zip(names, (source, target))).items()
        ]
    cut = cutting.format(source=names[0], text="Un homme dort.")
    if trained.family.name == "translation":
        joined = joining.format(target=names[1], found="translation")
        longest = generation(trained)["max_new_tokens"] - 1  # at which fairseq adds the end
        lines.append(_TRANSLATION.format(cut=cut, joined=joined, longest=longest))
    else:
        joined = joining.format(target=names[1], found="found.sequences[0]")
        start = "<s>" if trained.settings.task.get("add_bos_token") else "</s>"
        lines.append(_CAUSAL_LM.format(start=start, cut=cut, joined=joined))
    return "\n".join(lines)
