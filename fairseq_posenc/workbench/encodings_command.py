"""The commands ``list``, ``describe`` and ``count``: encodings, and their parameters."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Mapping
from functools import partial

from fairseq_posenc import registry, specs
from fairseq_posenc.analysis import catalogue
from fairseq_posenc.analysis.catalogue import BASE, BASE_LAYERS
from fairseq_posenc.assembly import count_parameters
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.errors import counted
from fairseq_posenc.user_dir import DECBERT
from fairseq_posenc.workbench.running.options import add_count, positive_int

_DECBERT = """{name}: an architecture, not an encoding: learned positions; its first two layers
attend in one direction only (DecBERT, Luo et al. 2022, arXiv:2204.08688)

In fairseq-train  --arch {name}
Equivalent        --position-encoding learned --attention-directions {directions}
The encoding      fairseq-posenc describe learned"""
_MAX_COLUMNS = 100  # longer lines are hard to read on any terminal
_LETTERS = {  # in formulas
    "h, H": "heads",
    "d, D": "width of a head",
    "C": "width of the model",
    "n": "longest input in tokens",
    "m": "layers",
    "B": "sentences",
    "T": "queries",
    "S": "keys",
    "R": "distances",
    "G": "tables, 1 or one for each head",
}
_OPTION_LETTERS = {"K": "max_distance", "c": "scale_factor"}  # of encodings with this option


def run_list(args: argparse.Namespace) -> None:
    """Print a line for each encoding."""
    names = registry.names(companions=True)  # also those added to others: windows, sinks, ...
    acts_on = {name: registry.get(name).acts_on for name in names}  # "input", "scores", ...
    width, acts_on_width = max(map(len, names)), max(map(len, acts_on.values()))
    for name in names:
        summary = _strip_marks(catalogue.summarize(name))
        print(f"{name:<{width}}  {acts_on[name]:<{acts_on_width}}  {summary}")


def add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of ``fairseq-posenc describe``."""
    text = "an encoding, a spec of several, or one of DecBERT's architectures"
    parser.add_argument("name", metavar="NAME", help=text)


def run_describe(args: argparse.Namespace) -> None:
    """Print an encoding's sections, options and number of parameters."""
    if directions := DECBERT.get(args.name):
        print(_DECBERT.format(name=args.name, directions=directions))
        return
    names = dict.fromkeys(item.name for item in specs.parse(args.name).items)  # each once
    print("\n\n".join(map(_describe, names)))


def _describe(name: str) -> str:
    """Describe an encoding: the sections of its docstring, options and parameters."""
    page = catalogue.parse_page(name)  # `summary` and each heading in lower case -> text
    rows = {x: page[x.lower()] for x in catalogue.HEADINGS if page[x.lower()]}
    rows["Options"] = catalogue.format_options(name)
    rows["Where"] = "decoders" if specs.parse(name).is_causal_only else "encoders and decoders"
    rows["At base size"] = counted(catalogue.count_at_base_size(name), "parameters")
    rows["Letters"] = _explain_letters(name, rows)
    width = min(shutil.get_terminal_size().columns, _MAX_COLUMNS)
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = [wrapper.fill(_strip_marks(f"{name}: {page['summary']}")), ""]
    wrapper.subsequent_indent = " " * 14  # the width of a heading, and a space
    lines += [wrapper.fill(_strip_marks(f"{key:<13} {value}")) for key, value in rows.items()]
    return "\n".join(lines)


def _strip_marks(text: str) -> str:
    """Strip the marks of code and of bold letters."""
    return text.replace("`", "").replace("**", "")


def _explain_letters(name: str, rows: Mapping[str, str]) -> str:
    """Explain the letters in an encoding's sections."""
    text = " ".join(rows.get(x, "") for x in ("Equation", "Shapes", "Parameters"))
    # Single letters, not in a word or a name, nor before an index or a prime.
    used = set(re.findall(r"(?<![A-Za-z_'])[A-Za-z](?![A-Za-z_0-9'])", text))
    known = registry.options(name)
    options = {x: f"the option {y}" for x, y in _OPTION_LETTERS.items() if y in known}
    meanings = {**_LETTERS, **options}.items()
    return "; ".join(f"{x}: {meaning}" for x, meaning in meanings if used & set(x.split(", ")))


def add_count_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc count``; the defaults are those of RoBERTa-base."""
    text = "position-encoding spec, as in learned+m4m"
    parser.add_argument("--encoding", required=True, metavar="SPEC", help=text)
    add_count(parser, "--layers", "number of layers", BASE_LAYERS)
    width, text = partial(positive_int, most=10**6), "width of the model (default: %(default)s)"
    parser.add_argument("--embed-dim", type=width, metavar="N", default=BASE.embed_dim, help=text)
    add_count(parser, "--heads", "attention heads of a layer", BASE.num_heads)
    add_count(parser, "--max-positions", "longest input in tokens", BASE.max_positions)
    parser.add_argument("--decoder", action="store_true", help="count for a causal stack")


def run_count(args: argparse.Namespace) -> None:
    """Print the number of position parameters, in total and by name."""
    spec = specs.parse(args.encoding)
    dims = Dims(args.embed_dim, args.heads, args.max_positions, args.decoder or spec.is_causal_only)
    spec.check_length(args.layers)  # refuses a spec that lists more layers
    sizes = count_parameters(spec, dims, args.layers)
    for name, size in sizes.items():
        print(f"{size:>12,}  {name}")
    print(f"{sum(sizes.values()):>12,}  {spec}")
