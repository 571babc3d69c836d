"""What a forward pass hands over to its layers: by thread, once, and nothing stays behind."""

from __future__ import annotations

import gc
import io
import pickle
import sys
import threading
import weakref
from functools import cache
from operator import attrgetter
from pydoc import locate

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_posenc import positions, registry
from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.forward_context import current_context
from tests.helpers.products import product_of, some_of
from tests.helpers.tiny_models import (
    ARCHITECTURES,
    STOCK,
    logits,
    make_model,
    make_tokens,
    needs_causal,
)

FAMILIES = list(ARCHITECTURES)
MASKS = "fairseq_posenc.mask.Mask._combine_parts"
CROSS = "rope(cross_attention=true)"
# Operations that make the CPU wait for a GPU.
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}


class Waits(TorchDispatchMode):
    """Counts operations for which a GPU would have to be waited for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name().split(".")[0] in WAITS
        return function(*args, **(kwargs or {}))


def waits(call) -> int:
    with torch.no_grad(), Waits() as counted:
        call()
    return counted.count


@pytest.mark.parametrize(("family", "spec"), [("masked_lm", "tupe"), ("translation", CROSS)])
def test_threads_do_not_meet(family, spec):
    model = make_model(family, position_encoding=spec)
    inputs = [make_tokens(2, length) for length in (5, 7, 9, 11)]
    with torch.no_grad():
        expected = [logits(model, family, tokens) for tokens in inputs]
    wrong: list[object] = []

    def run(number: int) -> None:
        with torch.no_grad():
            for _ in range(60):
                if not torch.equal(logits(model, family, inputs[number]), expected[number]):
                    wrong.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    failures: list[object] = []
    hook, threading.excepthook = threading.excepthook, failures.append
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        threading.excepthook = hook
    assert not failures
    assert not wrong


@pytest.mark.parametrize(
    ("family", "spec"), product_of(FAMILIES, ["learned+m4m", "rope", "tupe_shared"])
)
def test_a_model_is_freed_when_it_is_deleted(family, spec):
    model = make_model(family, position_encoding=spec)
    gc.collect()  # fairseq's way of building a model leaves cycles
    gc.disable()
    try:
        logits(model, family, make_tokens())
        alive = weakref.ref(model.decoder if family == "causal_lm" else model.encoder)
        del model
        assert alive() is None
    finally:
        gc.enable()
    assert current_context() is None


def test_a_pickled_layer_does_not_hold_its_model():
    model = make_model("masked_lm", position_encoding="learned+m4m", max_positions=512)
    layer = model.encoder.sentence_encoder.layers[0]
    parameters = sum(p.numel() * p.element_size() for p in layer.parameters())
    buffer = io.BytesIO()
    pickle.dump(layer, buffer)
    assert len(buffer.getvalue()) < parameters + 20_000


def test_a_forward_pass_that_fails_leaves_nothing():
    model = make_model("masked_lm", position_encoding="learned")
    with pytest.raises(ValueError, match="longer than the 24 positions"):
        model(make_tokens(1, 30))
    assert current_context() is None


@pytest.mark.parametrize("spec", ["shaw", "rope", "m4m,none"])
def test_attention_of_another_stack_is_refused(spec):
    model = make_model("translation", position_encoding=spec)
    tokens = make_tokens()
    x = torch.randn(tokens.size(1), tokens.size(0), model.encoder.dims.embed_dim)
    with model.encoder.at_positions(tokens, None):
        model.encoder.layers[0].self_attn(x, x, x)
        with pytest.raises(UserError, match="outside its stack's forward"):
            model.decoder.layers[0].self_attn(x, x, x)
        with pytest.raises(UserError, match="outside its stack's forward"):
            model.decoder.extract_features(tokens)
    refused = pytest.raises(UserError, match="at_positions: pass all tokens at once")
    with model.decoder.at_positions(tokens, None), refused:
        model.decoder.extract_features(tokens[:, :1], incremental_state={})


@pytest.mark.parametrize(
    ("family", "spec"),
    dict.fromkeys(
        ("causal_lm" if needs_causal(spec) else family, spec)
        for spec, family in product_of([*registry.names(), "m4m+reset", CROSS], FAMILIES)
    ),
)
def test_a_gpu_is_waited_for_once_a_stack_and_never_in_a_step(family, spec, monkeypatch):
    """Beyond fairseq's own model, whose stacks ask whether anything is padded."""
    tokens = make_tokens(padding=3)
    ours = make_model(family, position_encoding=spec, position_backend="reference")
    theirs = make_model(family, STOCK[family])
    stacks = 2 if family == "translation" else 1
    base, found = (waits(lambda m=m: logits(m, family, tokens)) for m in (theirs, ours))
    assert found <= base + stacks
    if family == "masked_lm":
        return
    monkeypatch.setattr(positions, "reading_waits", lambda device: True)
    assert steps(ours, family, tokens) <= steps(theirs, family, tokens)


def test_values_on_a_cpu_may_be_read_in_each_step():
    assert positions.may_sync(torch.device("cpu"), decoding=True)


def steps(model, family, tokens) -> int:
    """Count how often three steps of decoding wait."""
    out = model.encoder(tokens, tokens.ne(1).sum(1)) if family == "translation" else None
    state: dict = {}

    def decode() -> None:
        for length in (1, 2, 3):
            model.decoder(tokens[:, :length], encoder_out=out, incremental_state=state)

    return waits(decode)


BACKENDS = "fairseq_posenc.backends"
MADE_ONCE = [
    # Sines of each stack's own tokens, and of the source in encoder-decoder attention.
    *(("causal_lm", spec, "auto", "torch.complex", 1) for spec in ("rope", "xpos")),
    ("translation", CROSS, "auto", "torch.complex", 3),
    # A reset's first token, and its rows.
    ("masked_lm", "m4m+reset", "auto", "torch.eye", 1),
    ("masked_lm", "m4+reset", "reference", f"{BACKENDS}.by_distance._compute_row_index", 1),
    *(
        (family, "t5", backend, made, 1)
        for family in ("masked_lm", "causal_lm")
        for backend, made in (("sdpa", f"{BACKENDS}.sdpa._build_bias"), ("reference", MASKS))
    ),
]


@pytest.mark.parametrize(("family", "spec", "backend", "made", "times"), MADE_ONCE)
def test_what_layers_share_is_made_once_a_forward_pass(
    family, spec, backend, made, times, monkeypatch
):
    calls = []
    owner, _, name = made.rpartition(".")
    real = attrgetter(name)(locate(owner))
    monkeypatch.setattr(made, lambda *args, **more: calls.append(1) or real(*args, **more))
    model = make_model(family, position_encoding=spec, position_backend=backend)
    tokens = make_tokens(padding=3)
    for training in (False, True):
        model.train(training)
        for _ in range(2):
            calls.clear()
            logits(model, family, tokens)
            assert len(calls) == times


@torch.no_grad()
def compiled(model, family, tokens) -> tuple[torch.Tensor, int]:
    """Return the logits of a compiled model, and how often its graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    found = logits(torch.compile(model, backend="eager"), family, tokens)
    return found, sum(counters["graph_break"].values())


@cache
def stock_breaks(family) -> int:
    return compiled(make_model(family, STOCK[family]), family, make_tokens())[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "spec"),
    some_of(
        [("causal_lm", "tupe")],
        [("masked_lm", "m4m+alibi"), ("causal_lm", "tupe"), ("translation", "learned+rope")],
    ),
)
def test_models_compile_as_fairseqs_own_do(family, spec):
    model = make_model(family, position_encoding=spec)
    tokens = make_tokens(padding=3)
    found, breaks = compiled(model, family, tokens)
    with torch.no_grad():
        torch.testing.assert_close(found, logits(model, family, tokens), rtol=1e-5, atol=1e-5)
    assert 0 < stock_breaks(family) <= breaks <= stock_breaks(family) + 1
