"""The commands ``list`` and ``user-dir``; the latter is quick, as it does not import torch."""

import argparse

from fairseq_posenc.user_dir import USER_DIR


def run_list(args: argparse.Namespace) -> int:
    """Print a line for each encoding."""
    from fairseq_posenc import registry  # imports torch
    from fairseq_posenc.analysis import catalogue

    names = registry.names(companions=True)  # with windows, temperatures, ...
    acts_on = {name: registry.get(name).acts_on for name in names}
    width, acts_on_width = max(map(len, names)), max(map(len, acts_on.values()))
    for name in names:
        summary = catalogue.summarize(name).replace("``", "")
        print(f"{name:<{width}}  {acts_on[name]:<{acts_on_width}}  {summary}")
    return 0


def run_user_dir(args: argparse.Namespace) -> int:
    """Print the path of the package."""
    print(USER_DIR)
    return 0
