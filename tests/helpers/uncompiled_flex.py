"""Runs FlexAttention on a CPU: torch then computes the same functions without a kernel."""

import pytest
import torch
from torch.nn.attention import flex_attention

from fairseq_posenc.backends import flex


def attend_traced(*given, **named):
    """Call FlexAttention; torch, which traces it, fails at times when it knows other functions."""
    torch._dynamo.reset()
    return flex_attention.flex_attention(*given, **named)


def attend_uncompiled(*given, **named):
    """Call FlexAttention where torch calls the functions as they are, if it has such a mode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
        return attend_traced(*given, **named)


def run_uncompiled(monkeypatch: pytest.MonkeyPatch, attend=attend_uncompiled) -> None:
    """Let the backend serve on a CPU what it serves on a GPU, in float64 as well."""
    refuses, query = flex.refuses, torch.empty(1, 1, 1, 64, device="meta")  # as on a GPU
    monkeypatch.setattr(flex, "unavailable", str)
    monkeypatch.setattr(flex, "_compile_attention", lambda: attend)
    monkeypatch.setattr(flex, "refuses", lambda call: refuses(call._replace(query=query)))
