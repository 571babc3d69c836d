"""Recommends an encoding from measurements of the project, not from the user's text.

The measurements are in ``evidence.json``, by family of models; ``make docs`` writes it from the
records in ``docs/results``. The best mean is recommended; others get a *verdict* by comparison.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc import registry
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.variants import CAUSAL, ENCODER_DECODER, MASKED, join_list
from fairseq_posenc.workbench.results import markdown
from fairseq_posenc.workbench.results.differences import PERPLEXITY, Scale, Values, find_different
from fairseq_posenc.workbench.results.intervals import Interval, interval, interval_of_perplexity

EVIDENCE = Path(__file__).with_name("evidence.json")
# Verdicts on an encoding, by comparison with the best one.
BEST = "best"
SAME = "not significantly worse"
UNKNOWN = "not known well enough"
WORSE = "significantly worse"
UNREADABLE = "cannot be read"
BLEU = Scale("BLEU", higher_is_better=True)
# Candidates if the user names none: on two cores, the default budget trains so many long enough.
_CANDIDATES = 4
_FAST = 1.1  # longest time of a layer with a fast encoding, as a multiple of that with `none`
_MODELS = {MASKED: "a masked LM", CAUSAL: "a causal LM", ENCODER_DECODER: "a translation model"}


class ChooseQuestion(NamedTuple):
    """A user's question."""

    family: str  # masked-lm, causal-lm or encoder-decoder
    length: int  # length of inputs in tokens
    trained: int  # length in training in tokens
    names: Sequence[str] = ()  # encodings to choose from; empty for all


class Measurement(NamedTuple):
    """A figure that was measured with each encoding."""

    title: str  # name of the measured figure
    source: str  # file names of the records
    higher: bool  # whether higher is better
    # values of all seeds by encoding; None if the model cannot read such inputs
    values: dict[str, list[Optional[float]]]

    @property
    def scale(self) -> Scale:
        """The scale on which models are compared."""
        return BLEU if self.higher else PERPLEXITY

    def average(self, name: str) -> Interval:
        """Average an encoding's values over seeds; infinite if it cannot read such inputs."""
        worst = -math.inf if self.higher else math.inf
        average = interval if self.higher else interval_of_perplexity
        return average(worst if value is None else value for value in self.values[name])


class Evidence(NamedTuple):
    """All that was measured in a family of models."""

    models: str  # description of the models: size, text, updates and seeds
    trained: int  # input length in training in tokens; 0 if sentences have different lengths
    longest: int  # longest input in evaluation: in tokens, or in words of sentences
    # by input length as a multiple of that in training: "1", "2", ...
    figures: dict[str, Measurement]
    times: dict[str, float]  # time of a layer by encoding, as a multiple of that with `none`


class Ranking(NamedTuple):
    """Encodings ranked by a measurement."""

    measurement: Measurement
    verdicts: dict[str, str]  # by encoding, best first

    @property
    def best(self) -> str:
        """The encoding with the best figure."""
        return next(iter(self.verdicts))

    def list_with(self, verdict: str) -> list[str]:
        """List the encodings with a verdict."""
        return [name for name, other in self.verdicts.items() if other == verdict]

    def show(self, name: str) -> str:
        """Format an encoding's figure with its interval."""
        if self.verdicts[name] == UNREADABLE:
            return UNREADABLE
        return self.measurement.average(name).show(2)


def read_evidence(family: str) -> Evidence:
    """Read the measurements for a family."""
    content = json.loads(EVIDENCE.read_text(encoding="utf-8"))[family]
    figures = {factor: Measurement(**entry) for factor, entry in content.pop("figures").items()}
    return Evidence(**content, figures=figures)


def find_measurement(question: ChooseQuestion, evidence: Evidence) -> Optional[Measurement]:
    """Find the measurement that decides an answer; None if no measured inputs were so long.

    If a model is trained at 64 tokens and reads 100, the smallest measured multiple of the length
    in training that is at least 100 / 64 decides, such as 2.
    """
    factor = question.length / question.trained
    long_enough = [key for key in evidence.figures if int(key) >= factor]
    return evidence.figures[min(long_enough, key=int)] if long_enough else None


def rank(measurement: Measurement, names: Optional[Collection[str]] = None) -> Ranking:
    """Rank those of the encodings ``names`` that were measured; None ranks all of them."""
    ranked = [name for name in measurement.values if names is None or name in names]
    means = {name: measurement.average(name).mean for name in ranked}
    by_seed = {
        name: {seed: value for seed, value in enumerate(values) if value is not None}
        for name, values in measurement.values.items()
    }
    return Ranking(measurement, compare_with_best(means, by_seed, measurement.scale))


def compare_with_best(
    means: Mapping[str, float], by_seed: Mapping[str, Values], scale: Scale
) -> dict[str, str]:
    """Compare encodings with the best one; return their verdicts, the best mean first.

    An encoding whose mean is behind that of a significantly worse one, but which the test does not
    find worse, has seeds that vary too much: it is not known well enough. A mean is infinite if the
    model cannot read the input. An encoding that is missing in ``by_seed``, because only its mean
    is published, is never found worse.
    """
    readable = [name for name, mean in means.items() if math.isfinite(mean)]
    ranked = sorted(readable, key=lambda name: means[name], reverse=scale.higher_is_better)
    verdicts: dict[str, str] = {}
    if ranked:
        best, *others = ranked
        verdicts[best] = BEST
        samples = {name: by_seed.get(name, {}) for name in others}
        worse = find_different(by_seed.get(best, {}), samples, scale)
        for name in others:
            if_not_worse = UNKNOWN if WORSE in verdicts.values() else SAME
            verdicts[name] = WORSE if name in worse else if_not_worse
    return verdicts | {name: UNREADABLE for name in means if name not in readable}


def answer_question(question: ChooseQuestion) -> str:
    """Answer in Markdown: a recommendation, its evidence, and a table.

    Raises:
        UserError: none of the requested encodings was measured, or none can read such inputs.
    """
    evidence = read_evidence(question.family)
    measurement = find_measurement(question, evidence)
    condition = f"trained at {question.trained:,} tokens and read at {question.length:,}"
    if measurement is None:
        advice = _advise_training(question)
        return f"No encoding can be recommended: no model was {condition}. {advice}"
    ranking = rank(measurement, question.names or None)
    model = _MODELS[question.family]
    listed = join_list(question.names)
    if not ranking.verdicts:
        raise UserError(
            f"--encodings {listed}: none of these was measured in {model}; leave the option out to "
            "see those that were, or train them with --text"
        )
    best = ranking.best
    if ranking.verdicts[best] == UNREADABLE:  # and so are all others, which follow it
        raise UserError(
            f"--encodings {listed}: none of these could read such inputs; leave the option out to "
            "see those that could"
        )
    if question.length <= evidence.longest and evidence.trained in (0, question.trained):
        recommendation = f"Take `{best}` for {model} {condition}: {_describe_best(ranking)}"
    elif evidence.trained:
        recommendation = (
            f"No encoding can be recommended: no model was {condition}. Try `{best}` first: in "
            f"the nearest measurement, trained at {evidence.trained:,} tokens, "
            f"{_describe_best(ranking)}"
        )
    else:  # sentences to translate, which are longer than all measured ones
        recommendation = (
            f"No encoding can be recommended: the longest translated sentences had "
            f"{evidence.longest} words. Try `{best}` first: on those, {_describe_best(ranking)}"
        )
    rivals = [*_list_rivals(ranking), *_recommend_fast(ranking, evidence.times)]
    return "\n\n".join(
        [" ".join([recommendation, *rivals]), *_show_evidence(question, evidence, ranking)]
    )


def _show_evidence(question: ChooseQuestion, evidence: Evidence, ranking: Ranking) -> list[str]:
    """Describe the measured models, and format the table with its explanation."""
    measurement = ranking.measurement
    times = {name: f"{time:.2f}" for name, time in evidence.times.items()}
    rows = [
        (f"`{name}`", ranking.show(name), verdict, times.get(name, "-"))
        for name, verdict in ranking.verdicts.items()
    ]
    names = question.names or encodings_of(question.family)
    missing = [f"`{name}`" for name in names if name not in measurement.values]
    return [
        f"Measured on {evidence.models}: larger models and other texts may differ. "
        f"{_advise_training(question)}",
        markdown.table(("encoding", measurement.scale.name, "compared", "time"), rows, "lrlr"),
        f"The figure is {measurement.title}, with its 95 % interval over the seeds; "
        f"{'higher' if measurement.higher else 'lower'} is better. The third column compares with "
        f"`{ranking.best}`. Time is that of a layer in training, as a multiple of that with `none`."
        + (f" Not measured: {', '.join(missing)}." if missing else ""),
    ]


def choose_candidates(question: ChooseQuestion) -> list[str]:
    """Choose the encodings to train if the user names none: those with the best figures.

    If no measured inputs were so long, the figures at the length of training decide.
    """
    evidence = read_evidence(question.family)
    names = encodings_of(question.family)
    measurement = find_measurement(question, evidence) or evidence.figures["1"]
    # Measurements also have DecBERT's models, which are no encodings, and may lack new encodings.
    measured = [name for name in rank(measurement).verdicts if name in names]
    return list(dict.fromkeys([*measured, *names]))[:_CANDIDATES]


def encodings_of(family: str) -> list[str]:
    """List the registered encodings that work in a family."""
    return registry.names(encoder=family != CAUSAL)


def _describe_best(ranking: Ranking) -> str:
    """Describe the best figure."""
    measurement = ranking.measurement
    return (
        f"of {len(ranking.verdicts)} encodings it has the "
        f"{'highest' if measurement.higher else 'lowest'} {measurement.title}, "
        f"{ranking.show(ranking.best)}."
    )


def _list_rivals(ranking: Ranking) -> list[str]:
    """List the encodings that may be as good as the best."""
    sentences = []
    for verdict, reason in (SAME, ""), (UNKNOWN, ": the seeds differ too much"):
        if shown := [f"`{name}` at {ranking.show(name)}" for name in ranking.list_with(verdict)]:
            *others, last = shown
            listed = f"{', '.join(others)} and {last} are" if others else f"{last} is"
            sentences.append(f"{listed} {verdict}{reason}.")
    return sentences


def _recommend_fast(ranking: Ranking, times: dict[str, float]) -> list[str]:
    """Recommend the best of the fast encodings, unless the best one is fast or was not timed."""
    readable = [name for name, verdict in ranking.verdicts.items() if verdict != UNREADABLE]
    fast = [name for name in readable if times.get(name, math.inf) <= _FAST]
    if not fast or times.get(ranking.best, 0) <= _FAST:
        return []
    name = fast[0]
    return [
        f"If speed matters, take `{name}`, {ranking.show(name)}: a layer takes {times[name]:.2f} "
        f"times as long as without positions, with `{ranking.best}` {times[ranking.best]:.2f} "
        "times."
    ]


def _advise_training(question: ChooseQuestion) -> str:
    if question.family == ENCODER_DECODER:
        command = "train_scripts/translation_iwslt17.sh"
    else:
        command = f"fairseq-posenc choose --family {question.family} --length {question.length}"
        if question.trained != question.length:
            command += f" --trained {question.trained}"
        if question.names:
            command += f" --encodings '{join_list(question.names)}'"
        command += " --text my.txt"
    return f"To find out for your text, train candidates on it:\n\n    {command}"
