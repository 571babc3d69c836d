"""Whether a model is being exported, to one graph that serves all lengths."""

import torch


def is_exporting() -> bool:
    """Check whether the model is being exported to another format.

    torch 2.6 has no such query: there every compiled graph counts as exported.
    """
    return bool(getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)())
