"""Runs FlexAttention on a CPU: torch then computes the same functions without a kernel."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from fairseq_posenc.backends import flex


def attend_uncompiled(*given, **named):
    """Call FlexAttention; torch, which traces it, fails at times when it knows other functions."""
    torch._dynamo.reset()
    return flex_attention(*given, **named)


def run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend serve on a CPU what it serves on a GPU, in float64 as well."""
    refuses = flex.refuses
    monkeypatch.setattr(flex, "unavailable", str)
    monkeypatch.setattr(flex, "_compile_attention", lambda: attend_uncompiled)
    monkeypatch.setattr(
        flex,
        "refuses",
        lambda terms, call: refuses(terms, call._replace(device="cuda", head_dim=64)),
    )
