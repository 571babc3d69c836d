"""Trains every position encoding for a few hundred updates on real text, and reports the losses.

Models are built and trained by fairseq's own ``fairseq-train`` (its ``main``, called here, so that
the start-up is paid once), with equal seeds, sizes and order of the data. Two subjects:

* ``methods``: every encoding in a masked LM and in a translation model; those that only causal
  models have, in a causal LM. Writes ``trainability.md`` and ``trainability.json``.
* ``m4m-start``: starting values of M4M's table. Writes ``m4m_start.md``, ``.json`` and ``.png``.

Finished runs are kept as JSON lines in the working folder: the same command continues there.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import logging
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else waiting threads count as work
logging.getLogger().addHandler(logging.NullHandler())  # or fairseq prints every model

import torch  # noqa: E402
from fairseq import models, options  # noqa: E402
from fairseq.dataclass.utils import convert_namespace_to_omegaconf  # noqa: E402
from fairseq_cli import preprocess  # noqa: E402
from fairseq_cli import train as fairseq_train  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import fairseq_posenc  # noqa: E402
from fairseq_posenc import registry  # noqa: E402
from fairseq_posenc.attention import PositionalAttention  # noqa: E402
from fairseq_posenc.checkpoints import is_position_parameter  # noqa: E402
from fairseq_posenc.compare.corpus import write_corpus  # noqa: E402
from fairseq_posenc.compare.curves import parse_line  # noqa: E402
from fairseq_posenc.compare.picture import spread  # noqa: E402
from fairseq_posenc.compare.pieces import encode, train_pieces  # noqa: E402
from fairseq_posenc.compare.settings import TRAIN_OPTIONS  # noqa: E402
from fairseq_posenc.compare.steps import Step, own_folder, write_whole  # noqa: E402

NEVER = "1000000000"
VALIDATE_EVERY = 50
SIZES = ("--warmup-updates", "100", "--max-tokens", "2048")
_ADAM = (
    *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--lr", "0.003"),
    *("--lr-scheduler", "inverse_sqrt", *SIZES, "--dropout", "0", "--criterion", "cross_entropy"),
)
FAMILIES: dict[str, tuple[str, ...]] = {
    "masked LM": (*TRAIN_OPTIONS, *SIZES),
    "translation": (
        *("--task", "translation", "--arch", "transformer_none_tiny", *_ADAM),
        *("--encoder-embed-dim", "128", "--encoder-ffn-embed-dim", "512"),
        *("--share-all-embeddings", "--skip-invalid-size-inputs-valid-test"),
        *("--max-tokens", "1024"),
        *("--max-source-positions", "128", "--max-target-positions", "128"),
    ),
    "causal LM": (
        *("--task", "language_modeling", "--arch", "transformer_lm_none_tiny", *_ADAM),
        *("--decoder-embed-dim", "128", "--decoder-input-dim", "128"),
        *("--decoder-output-dim", "128", "--decoder-ffn-embed-dim", "512"),
        *("--share-decoder-input-output-embed", "--sample-break-mode", "none"),
        *("--tokens-per-sample", "64", "--max-target-positions", "64"),
    ),
}
REFERENCES = ("none", "learned")  # beside the causal-only encodings, to compare them with
VOCABULARY = {"text": 512, "translation": 2000}
MARGIN = 0.1  # bits; a smaller difference is no finding
BY_HAND = "<!-- Below this line: written by hand, and kept when the report is made again. -->"
GREY = "#666666"
# Okabe and Ito's, which colour-blind people can tell apart, after grey; then two more.
COLOURS = [
    *("#999999", "#000000", "#E69F00", "#0072B2", "#D55E00"),
    *("#009E73", "#CC79A7", "#56B4E9", "#7F3FBF", "#8B4513"),
]


class Run(NamedTuple):
    """One training.

    Attributes:
        family: a key of ``FAMILIES``.
        encoding: a spec.
        seed: of initial weights, order of the data, and masks.
        updates: number of training updates.
        start: a key of ``STARTS``: how tables of ``m4m`` are drawn.
        extra: options added to the family's.
    """

    family: str
    encoding: str
    seed: int
    updates: int
    start: str = "plain"
    extra: tuple[str, ...] = ()

    def command(self, data: Path) -> list[str]:
        """Return the options of ``fairseq-train``."""
        return [
            *(str(data), *FAMILIES[self.family], "--position-encoding", self.encoding),
            *("--max-update", str(self.updates), "--seed", str(self.seed), "--no-save"),
            *("--validate-interval-updates", str(VALIDATE_EVERY), "--validate-interval", NEVER),
            *("--log-format", "json", "--log-interval", "1", "--num-workers", "0", "--cpu"),
            *("--save-dir", str(data.parent / "unused"), "--distributed-world-size", "1"),
            *self.extra,
        ]


# Starts of M4M. Each gets a layer's attention and a generator, and returns the table's new value.


def _noise(like: Tensor, std: float, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator) * std


def _sigma(attention: PositionalAttention) -> float:
    """Return the standard deviation of a query's and a key's numbers, for inputs of variance 1."""
    stds = [proj.weight.std().item() for proj in (attention.q_proj, attention.k_proj)]
    return math.sqrt(stds[0] * stds[1] * attention.embed_dim)


def _normal(std: Callable[[PositionalAttention], float]) -> Any:
    def draw(attention: PositionalAttention, table: Tensor, generator: torch.Generator) -> Tensor:
        return _noise(table, std(attention), generator)

    return draw


def _unit_std(attention: PositionalAttention) -> float:
    """Return the deviation at which q.a and k.a have variance 1: scores spread as without M4M."""
    return 1.0 / (_sigma(attention) * math.sqrt(attention.head_dim))


def _scaled_std(attention: PositionalAttention) -> float:
    """Return 5 / sqrt(C d): with BERT's weights (std 0.02), q.a and k.a have deviation 0.1."""
    return 5.0 / math.sqrt(attention.embed_dim * attention.head_dim)


def _constant(attention: PositionalAttention, table: Tensor, generator: torch.Generator) -> Tensor:
    """Start all distances with one row, of a length at which q.a and k.a have variance 1."""
    row = torch.randn(table.size(-1), generator=generator)
    return (row / row.norm() / _sigma(attention)).expand_as(table).clone()


def _sinusoid(attention: PositionalAttention, table: Tensor, generator: torch.Generator) -> Tensor:
    """Start with sinusoids of the distance: near distances alike; variances as ``unit``."""
    reach, width = table.size(1) // 2, table.size(2) // 2
    frequencies = 10000.0 ** -(torch.arange(width) / width)
    angles = torch.arange(-reach, table.size(1) - reach)[:, None] * frequencies
    waves = torch.cat((angles.sin(), angles.cos()), dim=1) * math.sqrt(2)
    return (waves * _unit_std(attention)).expand_as(table).clone()


def _biased(attention: PositionalAttention, table: Tensor, generator: torch.Generator) -> Tensor:
    """Keep plain attention's scores, nearly: biases of q and k make q.a and k.a about 1.

    With both biases b = 4 sigma u (u of length 1) and every row a = u / (4 sigma), q.a and k.a are
    1, give or take a quarter.
    """
    direction = torch.randn(table.size(-1), generator=generator)
    direction = direction / direction.norm()
    size = 4 * _sigma(attention)
    for proj in (attention.q_proj, attention.k_proj):
        proj.bias.data.copy_((size * direction).repeat(attention.num_heads))
    return (direction / size).expand_as(table).clone()


STARTS: dict[str, tuple[str, Any]] = {
    "plain": ("normal, std 0.02", None),  # the package's own draw
    "std-0.05": ("normal, std 0.05", _normal(lambda attention: 0.05)),
    "scaled": ("normal, std 5/sqrt(C d), C the model's width", _normal(_scaled_std)),
    "std-0.1": ("normal, std 0.1", _normal(lambda attention: 0.1)),
    "d^-0.5": ("normal, std 1/sqrt(d)", _normal(lambda attention: attention.head_dim**-0.5)),
    "unit": ("normal, at the std that gives q.a and k.a variance 1", _normal(_unit_std)),
    "constant": ("one vector for all distances, q.a and k.a of variance 1", _constant),
    "sinusoid": ("sinusoids of the distance, q.a and k.a of variance 1", _sinusoid),
    "biased": ("one vector for all distances, and biases of q and k: q.a and k.a near 1", _biased),
}


def apply_start(model: nn.Module, run: Run) -> None:
    """Draw the tables of ``m4m`` anew; all other weights stay those of the same seed."""
    draw = STARTS[run.start][1]
    generator = torch.Generator().manual_seed(run.seed)
    for module in model.modules():
        if draw and isinstance(module, PositionalAttention) and "m4m" in module.encodings:
            table: Any = module.encodings["m4m"].table
            table.weight.data.copy_(draw(module, table.weight.data, generator))


class Recorder(logging.Handler):
    """Takes the figures of one training from fairseq's log while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Optional[nn.Module] = None
        self.first = math.nan
        self.training: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self.clock: list[float] = []
        self.gradients: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line of figures; losses in bits per token."""
        if record.name not in ("train_inner", "valid"):
            return
        entry = parse_line(f"| {record.name} | {record.getMessage()}")
        if entry is None:
            return
        loss = math.log2(entry.perplexity)
        if entry.kind == "valid":
            self.curve.append((entry.updates, round(loss, 4)))
            return
        self.clock.append(time.process_time())
        self.training.append(loss)
        if len(self.training) == 1:
            self.first = loss
            self.gradients = _gradient_sizes(self.model)

    def seconds(self) -> float:
        """Return seconds of processor time per 100 updates: 100 times the median update's."""
        steps = [after - before for before, after in zip(self.clock, self.clock[1:])]
        return 100 * statistics.median(steps) if steps else math.nan


def _gradient_sizes(model: Optional[nn.Module]) -> dict[str, float]:
    """Return root mean squares of the first update's gradients, which are still there."""
    found: dict[str, list[float]] = {"query projections": [], "position parameters": []}
    for name, value in model.named_parameters() if model else ():
        if value.grad is not None:
            size = value.grad.square().mean().sqrt().item()
            if name.endswith("self_attn.q_proj.weight"):
                found["query projections"].append(size)
            if is_position_parameter(name):
                found["position parameters"].append(size)
    return {name: statistics.mean(sizes) for name, sizes in found.items() if sizes}


@contextlib.contextmanager
def _recording(run: Run) -> Iterator[Recorder]:
    """Listen to the log, and change the start of the model that fairseq builds."""
    recorder = Recorder()
    build = models.build_model

    def build_model(*args: Any, **kwargs: Any) -> nn.Module:
        model = build(*args, **kwargs)
        apply_start(model, run)
        recorder.model = model
        return model

    root = logging.getLogger()
    root.addHandler(recorder)
    root.setLevel(logging.INFO)
    try:
        with mock.patch.object(models, "build_model", build_model):
            yield recorder
    finally:
        root.removeHandler(recorder)


def train(run: Run, data: Path) -> dict[str, Any]:
    """Train one model as ``fairseq-train`` does, and return its figures."""
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, input_args=run.command(data))
    began, diverged = time.monotonic(), ""
    with _recording(run) as recorder:
        try:
            fairseq_train.main(convert_namespace_to_omegaconf(args))
        except FloatingPointError as error:  # a finding, not a failure of the benchmark
            diverged = str(error).splitlines()[0]
    if recorder.model is None or not (recorder.curve or diverged):
        raise AssertionError(f"nothing was measured in {run}")
    sizes = {name: value.numel() for name, value in recorder.model.named_parameters()}
    return {
        "before": recorder.first,
        "curve": recorder.curve,
        "training": [round(statistics.mean(recorder.training[-20:]), 4)],
        "cpu_seconds_per_100": round(recorder.seconds(), 3),
        "wall_seconds": round(time.monotonic() - began, 1),
        "parameters": sum(sizes.values()),
        "position_parameters": sum(n for name, n in sizes.items() if is_position_parameter(name)),
        "gradients": recorder.gradients,
        "diverged": diverged,
    }


class Store:
    """Finished runs, a JSON line each."""

    def __init__(self, path: Path, data: dict[str, Path]) -> None:
        self._path = path
        self._data = data
        self._known: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # a line cut off by an interruption
                    kept = json.loads(line)
                    self._known[json.dumps(kept["command"])] = kept

    def get(self, run: Run) -> dict[str, Any]:
        """Return the figures of a run, training it if that was not done before."""
        folder = self._data[run.family]
        command = [run.start, *run.command(folder)]
        key = json.dumps(command)
        if key not in self._known:
            figures = {**run._asdict(), **train(run, folder), "command": command}
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")
            self._known[key] = figures
            end = figures["curve"][-1][1] if figures["curve"] else math.nan
            print(
                f"{run.family}, {run.encoding}, {run.start} {shlex.join(run.extra)} seed "
                f"{run.seed}: {end:.3f} bits after {figures['wall_seconds']:.0f} s",
                flush=True,
            )
        return self._known[key]


def _preprocess(folder: Path, *arguments: str) -> None:
    parser = options.get_preprocessing_parser()
    common = ["--destdir", str(folder / "binary"), "--workers", "1"]
    parts = [f"--{part}pref={folder / part}.pieces" for part in ("train", "valid")]
    preprocess.main(parser.parse_args([*common, *parts, *arguments]))


def make_text(folder: Path) -> dict[str, Any]:
    """Write the documentation inside Python as data for the language models."""
    facts = write_corpus(None, "Python's documentation", folder)
    train_pieces(folder / "train.txt", folder / "pieces", VOCABULARY["text"])
    for part in ("train", "valid"):
        encode(folder / "pieces.model", folder / f"{part}.txt", folder / f"{part}.pieces")
    _preprocess(folder, "--only-source")
    return {**facts, **_levels(folder, "train.pieces", "valid.pieces")}


def make_translation(folder: Path, files: dict[str, Path]) -> dict[str, Any]:
    """Write parallel text as data for translation.

    Args:
        folder: where to write.
        files: by ``train.source``, ``train.target``, ``valid.source``, ``valid.target``.
    """
    texts = {name: _read_lines(path) for name, path in files.items()}
    both = folder / "both.txt"
    both.write_text("\n".join(texts["train.source"] + texts["train.target"]) + "\n", "utf-8")
    train_pieces(both, folder / "pieces", VOCABULARY["translation"])
    for name, lines in texts.items():
        part, side = name.split(".")
        raw = folder / name
        raw.write_text("\n".join(lines) + "\n", "utf-8")
        encode(folder / "pieces.model", raw, folder / f"{part}.pieces.{side}")
    _preprocess(folder, "-s", "source", "-t", "target", "--joined-dictionary")
    facts = {f"{name} lines": len(lines) for name, lines in texts.items()}
    return {**facts, **_levels(folder, "train.pieces.target", "valid.pieces.target")}


def _read_lines(path: Path) -> list[str]:
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    return [" ".join(line.split()) for line in text.rstrip("\n").split("\n")]


def _levels(folder: Path, train_file: str, valid_file: str) -> dict[str, float]:
    """Return the loss of a model that knows only how frequent each piece is."""
    counts, valid = (
        Counter(
            word
            for line in (folder / name).read_text("utf-8").splitlines()
            for word in (*line.split(), "</s>")
        )
        for name in (train_file, valid_file)
    )
    total, kinds = sum(counts.values()), len(counts) + 1
    bits = sum(n * -math.log2((counts[word] + 1) / (total + kinds)) for word, n in valid.items())
    return {"unigram": bits / sum(valid.values())}


def method_runs(args: argparse.Namespace) -> list[Run]:
    """Return a run of every encoding in the families where it is compared."""
    both = registry.names_for(encoder=True, decoder=True)
    causal = set(registry.names_for(decoder=True)) - set(registry.names_for(encoder=True))
    names = {
        "masked LM": registry.names_for(encoder=True),
        "translation": both if args.files else [],
        "causal LM": [*REFERENCES, *causal],
    }
    wanted = set(args.methods or registry.names()) | {"none"}
    return [
        Run(family, name, seed, args.updates)
        for seed in args.seeds
        for family in args.families
        for name in sorted(names[family], key=lambda name: (name not in REFERENCES, name))
        if name in wanted
    ]


# Settings that the starts of M4M are compared in: name -> family, encoding, options, updates.
SETTINGS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "base": ("masked LM", "m4m", ()),
    "eps-1e-6": ("masked LM", "m4m", ("--adam-eps", "1e-6")),  # RoBERTa's
    "lr-0.0005": ("masked LM", "m4m", ("--lr", "0.0005")),
    "width-256": (
        *("masked LM", "m4m"),
        ("--encoder-embed-dim", "256", "--encoder-ffn-embed-dim", "1024"),
    ),
    "learned+m4m": ("masked LM", "learned+m4m", ()),
    "translation": ("translation", "m4m", ()),
}


def start_runs(args: argparse.Namespace) -> list[tuple[str, Run]]:
    """Return the runs that compare M4M's starts, each with the name of its setting.

    All starts are trained with the first seed in the first setting; those of ``--starts`` also with
    the other seeds, and in the other settings with the first seed.
    """
    first_setting, *other_settings = args.settings
    first_seed, *other_seeds = args.seeds
    cases = [(first_setting, first_seed, list(STARTS))]
    cases += [(first_setting, seed, args.starts) for seed in other_seeds]
    cases += [(setting, first_seed, args.starts) for setting in other_settings]
    runs = []
    for setting, seed, starts in cases:
        family, encoding, extra = SETTINGS[setting]
        common = (seed, args.updates)
        runs.append((setting, Run(family, "none", *common, extra=extra)))
        runs += [(setting, Run(family, encoding, *common, start, extra)) for start in starts]
    return runs


def machine() -> str:
    """Return a line that says where the figures are from."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return (
        f"{model}, torch {torch.__version__} on {torch.get_num_threads()} thread(s), "
        f"Python {platform.python_version()}, fairseq-posenc {fairseq_posenc.__version__}"
    )


def own_command(args: argparse.Namespace) -> str:
    """Return the command that makes the report again, without the user's folders."""
    words = [".venv/bin/python", "benchmarks/trainability.py", args.subject]
    words += ["--updates", str(args.updates), "--seeds", *map(str, args.seeds)]
    for name, path in args.files.items():
        part, side = name.split(".")
        words += [f"--{side}" if part == "train" else f"--valid-{side}", Path(path).name]
    if args.subject == "m4m-start":
        words += ["--settings", *args.settings, "--starts", *args.starts]
    else:
        chosen = args.families if args.families != list(FAMILIES) else []
        words += ["--families", *chosen] if chosen else []
        words += ["--methods", *args.methods] if args.methods else []
    return shlex.join(words)


def _table(header: list[str], rows: list[list[str]], rule: str = "--:") -> list[str]:
    """Return a Markdown table, its first column aligned left, the others as ``rule`` says."""
    rules = [":--", *[rule] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, rules, *rows)]


def _write(path: Path, lines: list[str]) -> None:
    """Write a report; keep what people wrote below the mark in the old one."""
    old = path.read_text("utf-8") if path.exists() else ""
    by_hand = old.partition(BY_HAND)[2] or "\n"
    write_whole(path, "\n".join([*lines, "", BY_HAND]) + by_hand)
    print(f"report: {path}", flush=True)


def _write_json(path: Path, facts: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Write all figures, without the commands, which hold the working folder."""
    runs = [{k: v for k, v in result.items() if k != "command"} for result in results]
    rows = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    write_whole(path, f'{{"data": {json.dumps(facts)},\n "runs": [\n{rows}\n]}}\n')


def end(result: dict[str, Any]) -> float:
    """Return the last validation loss, in bits; infinite if the training diverged."""
    return math.inf if result["diverged"] else float(result["curve"][-1][1])


class Row(NamedTuple):
    """One encoding in one family: means over the seeds."""

    encoding: str
    before: float
    end: float
    seconds: float
    parameters: int

    @classmethod
    def of(cls, results: list[dict[str, Any]]) -> Row:
        """Return the means of runs that differ only in their seeds."""
        return cls(
            results[0]["encoding"],
            statistics.mean(result["before"] for result in results),
            statistics.mean(map(end, results)),
            statistics.mean(result["cpu_seconds_per_100"] for result in results),
            results[0]["position_parameters"],
        )


def report_methods(args: argparse.Namespace, facts: dict[str, Any], store: Store) -> None:
    """Train every encoding and write ``trainability.md`` and ``trainability.json``."""
    runs = method_runs(args)
    results = [store.get(run) for run in runs]
    lines = _introduction(args, facts)
    for family in dict.fromkeys(run.family for run in runs):
        mine = [result for result in results if result["family"] == family]
        names = dict.fromkeys(result["encoding"] for result in mine)
        rows = [Row.of([r for r in mine if r["encoding"] == name]) for name in names]
        level = facts["translation" if family == "translation" else "text"]["unigram"]
        lines += ["", f"## {family}", "", *_method_table(rows), "", *_findings(rows, level)]
    _write_json(args.results / "trainability.json", facts, results)
    _write(args.results / "trainability.md", lines)


def _introduction(args: argparse.Namespace, facts: dict[str, Any]) -> list[str]:
    text = facts["text"]
    return [
        "# Does every method learn?",
        "",
        f"Each encoding trains {args.updates} updates of a tiny model through `fairseq-train`'s "
        "own `main`: 2 layers (translation: 2 + 2), width 128, 4 heads, batches of 2,048 tokens "
        "(translation: 1,024), "
        "Adam with a learning rate of 0.003 after 100 updates of warm-up, no dropout; seeds "
        f"{', '.join(map(str, args.seeds))}. Order of the data and masks are equal. Initial "
        "weights have equal seeds, but an encoding that draws numbers shifts those drawn after it.",
        "",
        f"Language models read Python's documentation ({text['words']:,} words, of which "
        f"{text['valid_words']:,} for validation; {VOCABULARY['text']} sentencepieces, blocks of "
        "64 tokens); translation reads the parallel text of the command "
        f"({VOCABULARY['translation']:,} sentencepieces).",
        "",
        f"    {own_command(args)}",
        "",
        f"Machine: {machine()}.",
        "",
        "Losses are in bits per predicted token. *Before* is the first batch before the first "
        "update; the others are those of the validation text at the end. *Time* is processor time "
        "of an update (the median over the run), relative to `none`; it hardly depends on what "
        "else the machine does. Parameters are those of positions alone.",
    ]


def _method_table(rows: list[Row]) -> list[str]:
    none = next(row for row in rows if row.encoding == "none")
    header = ["method", "before", "loss", "perplexity", "below `none`", "time", "parameters"]
    return _table(
        header,
        [
            [
                f"`{row.encoding}`",
                f"{row.before:.2f}",
                f"{row.end:.3f}",
                f"{2**row.end:.1f}" if row.end < math.inf else "diverged",
                f"{none.end - row.end:+.3f}",
                f"{row.seconds / none.seconds:.2f}",
                f"{row.parameters:,}",
            ]
            for row in sorted(rows, key=lambda row: row.end)
        ],
    )


def _findings(rows: list[Row], unigram: float) -> list[str]:
    """Say by rule which methods learn, and which make use of positions."""
    none = next(row for row in rows if row.encoding == "none")
    still = [row.encoding for row in rows if row.end > unigram - MARGIN]
    others = [row for row in rows if row is not none]
    like_none = [row.encoding for row in others if abs(row.end - none.end) <= MARGIN]
    worse = [row.encoding for row in others if row.end > none.end + MARGIN]
    better = [row.encoding for row in others if row.end < none.end - MARGIN]
    return [
        f"- Knowing only how frequent each piece is gives {unigram:.2f} bits. Not {MARGIN} below "
        f"that, so not learning: {_names(still)}.",
        f"- More than {MARGIN} bits below `none`, so making use of positions: {_names(better)}.",
        f"- Within {MARGIN} bits of `none`, so positions do not show yet: {_names(like_none)}.",
        f"- More than {MARGIN} bits above `none`: {_names(worse)}.",
    ]


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none of them"


Grid = dict[str, dict[str, list[dict[str, Any]]]]  # setting -> start, or "none" -> results


def report_starts(args: argparse.Namespace, store: Store) -> None:
    """Train M4M from each start and write ``m4m_start.md``, ``.json`` and ``.png``."""
    grid: Grid = {}
    for setting, run in start_runs(args):
        label = run.encoding if run.encoding == "none" else run.start
        grid.setdefault(setting, {}).setdefault(label, []).append(store.get(run))
    picture = args.results / "m4m_start.png"
    draw_starts(grid, picture)
    results = [result for labels in grid.values() for mine in labels.values() for result in mine]
    _write_json(args.results / "m4m_start.json", {}, results)
    _write(args.results / "m4m_start.md", _start_lines(args, grid, picture.name))


def _start_lines(args: argparse.Namespace, grid: Grid, picture: str) -> list[str]:
    return [
        "# How should M4M's table start?",
        "",
        "M4M multiplies three dot products, `(q_i.k_j) * (q_i.a_r) * (k_j.a_r)`, and its paper "
        "does not say how the vectors `a_r` start. The models are those of "
        "[trainability.md](trainability.md); all weights but the tables are equal for equal seeds.",
        "",
        f"    {own_command(args)}",
        "",
        f"Machine: {machine()}.",
        "",
        *_table(["start", "what it is"], [[f"`{k}`", v] for k, (v, _) in STARTS.items()], ":--"),
        "",
        *_loss_lines(args, grid),
        "",
        "How fast, and why: updates until the validation loss is below where `none` ends, and the "
        "size (root mean square) of the first update's gradients, in the first setting:",
        "",
        *_why_table(next(iter(grid.values()))),
        "",
        f"![learning curves]({picture})",
    ]


def _loss_lines(args: argparse.Namespace, grid: Grid) -> list[str]:
    seeds = ", ".join(map(str, args.seeds))
    labels = list(next(iter(grid.values())))
    settings = (f"`{name}`: {' '.join((*SETTINGS[name][:2], *SETTINGS[name][2]))}" for name in grid)
    return [
        f"Settings: {'; '.join(settings)}.",
        "",
        "Validation loss at the end, in bits per token (`none`: no positions; first setting: "
        f"mean over seeds {seeds} ± half the range; one seed if no ±):",
        "",
        *_table(
            ["start", *grid], [[f"`{x}`", *(_ends(grid[s].get(x)) for s in grid)] for x in labels]
        ),
    ]


def _ends(results: Optional[list[dict[str, Any]]]) -> str:
    if not results:
        return ""
    ends = [end(result) for result in results]
    spread_ = f" ± {(max(ends) - min(ends)) / 2:.2f}" if len(ends) > 1 else ""
    return f"{statistics.mean(ends):.3f}{spread_}"


def _why_table(labels: dict[str, list[dict[str, Any]]]) -> list[str]:
    level = end(labels["none"][0])
    rows = []
    for label, (first, *_) in labels.items():
        passed = next((at for at, loss in first["curve"] if loss < level), None)
        sizes = (first["gradients"].get(k) for k in ("query projections", "position parameters"))
        shown = ("" if size is None else f"{size:.0e}" for size in sizes)
        rows.append([f"`{label}`", "not reached" if passed is None else str(passed), *shown])
    return _table(["start", "below `none` after", "gradient of W_Q", "gradient of tables"], rows)


def draw_starts(grid: Grid, path: Path) -> None:
    """Draw the learning curves of every setting, labelled at their ends."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(6.2 * len(grid), 4.4), dpi=80, layout="constrained")
    for axes, (setting, labels) in zip(
        figure.subplots(1, len(grid), squeeze=False)[0], grid.items()
    ):
        curves = {label: _mean_curve(results) for label, results in labels.items()}
        axes.set_title(setting, loc="left", fontsize=11)
        axes.set_xlabel("updates", color=GREY)
        axes.tick_params(length=0, colors=GREY)
        axes.spines[["top", "right"]].set_visible(False)
        low, high = (choose(y for _, ys in curves.values() for y in ys) for choose in (min, max))
        heights = spread([(ys[-1] - low) / (high - low) for _, ys in curves.values()], 0.06)
        for (label, (xs, ys)), height in zip(curves.items(), heights):
            colour = dict(zip(("none", *STARTS), COLOURS))[label]
            axes.plot(xs, ys, color=colour, linewidth=1.8)
            text = f"{label}  {ys[-1]:.2f}"
            place = (1.02, (height * (high - low)) + low)
            axes.text(*place, text, color=colour, transform=axes.get_yaxis_transform(), va="center")
    figure.axes[0].set_ylabel("validation loss, bits per token", color=GREY)
    figure.savefig(path)


def _mean_curve(results: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    curves = [dict(map(tuple, result["curve"])) for result in results]
    shared = sorted(set.intersection(*map(set, curves)))
    return shared, [statistics.mean(curve[x] for curve in curves) for x in shared]


def prepare(out: Path, files: dict[str, Path]) -> tuple[dict[str, Path], dict[str, Any]]:
    """Make the data, or find it made; return the folder of each family, and figures."""
    step = Step(out / "text", {"vocabulary": VOCABULARY["text"], "python": sys.version})
    facts = {"text": step.do(lambda: make_text(step.folder))}
    folders = dict.fromkeys(("masked LM", "causal LM"), step.folder / "binary")
    if files:
        inputs = {"vocabulary": VOCABULARY["translation"], **{k: str(v) for k, v in files.items()}}
        parallel = Step(out / "parallel", inputs)
        facts["translation"] = parallel.do(lambda: make_translation(parallel.folder, files))
        folders["translation"] = parallel.folder / "binary"
    return folders, facts


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("subject", choices=("methods", "m4m-start"))
    add("--updates", type=int, default=300, help="training updates of each model (default: 300)")
    add("--seeds", type=int, nargs="+", default=[1], help="seeds (default: 1)")
    names = registry.names()
    add("--methods", nargs="+", choices=names, metavar="NAME", help="encodings (default: all)")
    add("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="(default: all)")
    add("--threads", type=int, default=1, help="threads of torch (default: 1)")
    add("--source", type=Path, help="training text, source language, a sentence a line; or .gz")
    add("--target", type=Path, help="the same sentences in the target language")
    add("--valid-source", type=Path, help="validation text, source language")
    add("--valid-target", type=Path, help="validation text, target language")
    first, few = list(SETTINGS)[:1], list(STARTS)
    add("--settings", nargs="+", choices=SETTINGS, default=first, help="where M4M's starts compete")
    add("--starts", nargs="+", choices=STARTS, default=few, help="of other settings and seeds")
    add("--out", type=Path, default=Path("build/trainability"), help="working folder")
    add("--results", type=Path, default=Path("docs/results"), help="folder of the reports")
    args = parser.parse_args()
    sides = (args.source, args.target, args.valid_source, args.valid_target)
    if any(sides) and not all(sides):
        parser.error("translation needs --source, --target, --valid-source and --valid-target")
    parts = ("train.source", "train.target", "valid.source", "valid.target")
    args.files = dict(zip(parts, sides)) if all(sides) else {}
    return args


def main() -> None:
    """Train what is missing, and write the report."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    with own_folder(args.out):
        folders, facts = prepare(args.out, args.files)
        store = Store(args.out / "runs.jsonl", folders)
        args.results.mkdir(parents=True, exist_ok=True)
        if args.subject == "methods":
            report_methods(args, facts, store)
        else:
            report_starts(args, store)


if __name__ == "__main__":
    main()
