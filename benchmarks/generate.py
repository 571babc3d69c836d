"""Measures the speed of beam search in translation, with each encoding against `sinusoidal`.

The model is fairseq's base Transformer with random weights, in fairseq's own sequence generator.
Every hypothesis is forced to the same length (as by --min-len and --max-len-b), so that all models
do the same number of steps, whatever they predict. `sinusoidal` has a turn before and after every
other model. All models share one set of weights: a step mostly reads weights, and the speed of that
depends on their place in memory.

    python benchmarks/generate.py --encodings all
"""

from __future__ import annotations

from measuring.process import restart_with_settings

if __name__ == "__main__":
    restart_with_settings()  # of the allocator and of logs, which torch reads when imported

import argparse
from statistics import median

import torch
from fairseq.dataclass.configs import GenerationConfig
from torch import Tensor

from measuring import timing
from measuring.commands import add_device, add_encodings, add_turns, new_parser, run_script
from measuring.contenders import STOCK, Contender
from measuring.families import FAMILIES, Case, build
from measuring.page import Rows

BASELINE = Contender("sinusoidal", "auto")
BATCH = {"cpu": 4, "cuda": 64}  # sentences


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add_encodings(parser, ["learned", "rope", "alibi", "shaw", "m4m"])
    add_device(parser)
    add_turns(parser)
    add = parser.add_argument
    add("--batch", type=int, help="sentences (default: 4 on the CPU, 64 on a GPU)")
    add("--size", choices=["tiny", "base", "large"], default="base", help="(default: base)")
    add("--length", type=int, default=32, help="tokens of source and hypotheses (default: 32)")
    add("--beam", type=int, default=5, help="(default: 5)")
    return parser.parse_args(words)


def build_pass(
    contender: Contender, case: Case, beam: int, weights: dict[str, Tensor]
) -> timing.Pass:
    """Build a pass that translates one batch.

    All models share ``weights``, by name; weights that it lacks are added to it.

    Raises:
        AssertionError: a hypothesis has another length, so that models would do different work.
    """
    config, task, model = build(contender, case)
    model.to(case.device, case.dtype).eval()
    for name, parameter in model.named_parameters():
        parameter.data = weights.setdefault(name, parameter.data)
    config.generation.beam = beam
    model.prepare_for_inference_(config)  # as fairseq-generate does
    words = case.length - 1  # the last token is the end of the sentence
    settings = GenerationConfig(beam=beam, max_len_a=0, max_len_b=words, min_len=words)
    generator = task.build_generator([model], settings)
    source = torch.randint(  # of the second half of the dictionary, which has no special symbols
        len(task.source_dictionary) // 2,
        len(task.source_dictionary),
        (case.batch, case.length),
        generator=torch.Generator().manual_seed(1),
    ).to(case.device)
    source[:, -1] = task.source_dictionary.eos()
    lengths = torch.full((case.batch,), case.length, device=case.device)
    batch = {"net_input": {"src_tokens": source, "src_lengths": lengths}}

    def run() -> None:
        hypotheses = task.inference_step(generator, [model], batch)
        assert all(len(beams[0]["tokens"]) == case.length for beams in hypotheses)

    return run


def measure(args: argparse.Namespace) -> Rows:
    """Measure a row for the baseline, for stock fairseq, and for each encoding."""
    size = FAMILIES["translation"].sizes[args.size]
    batch = args.batch or BATCH[args.device.type]
    case = Case.from_args(args, batch=batch, dropout=0.0, mode="forward", family="translation")
    case = case._replace(size=size, vocabulary=10_000)
    ours = [Contender(spec, "auto") for spec in case.encodings(args.encodings)]
    group = list(dict.fromkeys([BASELINE, STOCK, *ours]))  # the encodings may have the baseline
    weights: dict[str, Tensor] = {}
    baseline, *others = (build_pass(contender, case, args.beam, weights) for contender in group)
    turns = [baseline]  # it has all turns with even numbers
    for other in others:
        turns += [other, baseline]
    turns_of_group = [0, *range(1, len(turns), 2)]
    rounds = timing.interleaved(turns, case.device, args.rounds, args.seconds)
    return [
        {
            "device": case.device.type,
            "encoding": contender.encoding,
            "backend": contender.backend,
            "beam": args.beam,
            "length": case.length,
            "batch": case.batch,
            "dtype": args.dtype,
            "tokens_per_second": case.batch * case.length / timing.median(rounds, turn),
            "ratio": relative_speed(rounds, turn),
        }
        for turn, contender in zip(turns_of_group, group)
    ]


def relative_speed(rounds: list[list[float]], turn: int) -> float:
    """Compute the speed of a model relative to the turns around it, the median over the rounds."""
    if turn == 0:
        return 1.0  # the baseline
    return median((times[turn - 1] + times[turn + 1]) / 2 / times[turn] for times in rounds)


if __name__ == "__main__":
    run_script("generate", parse_args, measure)
