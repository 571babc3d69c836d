"""Imports the Triton kernels and runs them: on a GPU if there is one, else on the interpreter."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from fairseq_posenc.backends import triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def import_kernels(*names: str) -> list[ModuleType]:
    """Import modules of the backend; without a GPU, their kernels are interpreted.

    Tests of a module that imports them are skipped where Triton, or the GPU, is too old or missing.
    """
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            # Triton reads it when kernels are defined. Other tests, and what they start, must not.
            patch.setenv("TRITON_INTERPRET", "1")
        if why := triton.unavailable():
            pytest.skip(why, allow_module_level=True)
        return [importlib.import_module(f"fairseq_posenc.backends.triton.{x}") for x in names]


def interpret(patch: pytest.MonkeyPatch) -> None:
    """Let kernels run on the interpreter until the patch is undone, if there is no GPU."""
    if DEVICE != "cpu":
        return
    patch.setenv("TRITON_INTERPRET", "1")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if hasattr(interpreter, "_LangPatchScope"):  # from Triton 3.6 on
        patch.setattr(interpreter, "_patch_lang", _put_once(interpreter, interpreter._patch_lang))


def _put_once(interpreter, put):
    """Put the interpreter's functions into place for a kernel, and not again for all it calls."""
    tl = importlib.import_module("triton.language")

    def put_if_not_there(function):
        places = [x for x in (tl, tl.core) if x in function.__globals__.values()]
        is_there = not any(tl.core.is_builtin(place.load) for place in places)
        return interpreter._LangPatchScope() if is_there else put(function)

    return put_if_not_there
