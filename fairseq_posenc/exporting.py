"""Tells whether a model is being exported, so that one graph must serve all lengths."""

import torch


def is_exporting() -> bool:
    """Check whether torch is exporting a model.

    torch 2.6 has no such query, so with it every compiled graph counts as exported.
    """
    return bool(getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)())
