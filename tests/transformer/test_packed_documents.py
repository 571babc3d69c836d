"""Packed documents: each gives in a block what it gives alone."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from fairseq_posenc.api import PositionEncoding, SelfAttention, StackPositions
from fairseq_posenc.errors import UserError
from tests.helpers.commands import train
from tests.helpers.formulas import wake
from tests.helpers.products import product_of, some_of
from tests.helpers.tiny_models import (
    COMPOSITIONS,
    PATTERNS,
    REPRESENTATIVES,
    encoding_specs,
    make_model,
    needs_causal,
)

PAD, EOS = 1, 2
EVERY = ["none", *encoding_specs("input", "scores", "rotation"), *COMPOSITIONS, *PATTERNS]
# Options change numbers of an encoding, but for a reset not what a document is to it.
SPECS = some_of([spec for spec in EVERY if "(" not in spec or "reset" in spec], EVERY)
# Documents of an encoder end with </s>; those of a causal model begin with it.
DOCUMENTS = [[0, 5, 6, 7, EOS], [8, 9, EOS], [10, 11, 12, 13, EOS]]
CAUSAL = [[EOS, 5, 6, 7], [EOS, 8, 9], [EOS, 10, 11, 12, 13]]
# The same, where an empty line ends a document.
BY_EMPTY = [[0, 5, EOS, 6, EOS, EOS], [8, EOS, 9, EOS, EOS], [10, 11, EOS]]
CAUSAL_BY_EMPTY = [[EOS, 5, EOS, 6, EOS], [EOS, 8, EOS, 9, EOS], [EOS, 10, 11, EOS]]


@pytest.mark.parametrize(
    ("spec", "family", "end"),
    dict.fromkeys(
        (spec, "causal_lm" if needs_causal(spec) else family, end)
        for spec, family, end in product_of(SPECS, ["masked_lm", "causal_lm"], ["eos", "empty"])
    ),
)
def test_a_document_in_a_block_gives_what_it_gives_alone(spec, family, end):
    causal = family == "causal_lm"
    documents = {"eos": (DOCUMENTS, CAUSAL), "empty": (BY_EMPTY, CAUSAL_BY_EMPTY)}[end][causal]
    model = wake(make_model(family, position_encoding=f"{spec}+documents(end={end})")).double()
    block = list(chain(*documents))
    outputs = model(torch.tensor([[PAD] * 3 + block, block + [PAD] * 3], dtype=torch.long))[0]
    for row, start in ((0, 3), (1, 0)):
        for document in documents:
            alone = model(torch.tensor([document]))[0][0]
            together = outputs[row, start : start + len(document)]
            torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
            start += len(document)


@pytest.mark.parametrize(
    "spec", [s for s in some_of(REPRESENTATIVES, SPECS) if not needs_causal(s) and "," not in s]
)
def test_translation_models_read_documents_on_either_side(spec):
    """Of a source block, and of a target block that attends to one source."""
    model = wake(make_model("translation", position_encoding=f"{spec}+documents")).double()
    sources, targets = (torch.tensor([[*chain(*each)]]) for each in (DOCUMENTS, CAUSAL))
    encoded = model.encoder(sources, torch.tensor([sources.size(1)]))
    decoded = model.decoder(targets, encoder_out=encoded)[0]
    start = end = 0
    for source, target in zip(DOCUMENTS, CAUSAL):
        alone = model.encoder(torch.tensor([source]), torch.tensor([len(source)]))
        together = encoded["encoder_out"][0][start : (start := start + len(source))]
        torch.testing.assert_close(together, alone["encoder_out"][0], rtol=1e-9, atol=1e-9)
        alone = model.decoder(torch.tensor([target]), encoder_out=encoded)[0]
        together = decoded[:, end : (end := end + len(target))]
        torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spec", ["rope", "t5", "m4+reset", "learned+m4m", "fire", "tupe+reset"])
def test_decoding_equals_the_full_pass(spec):
    model = wake(make_model("causal_lm", position_encoding=f"{spec}+documents")).double()
    tokens = torch.tensor([list(chain(*CAUSAL)), [EOS, 5, EOS, 6, EOS, 7, 8, 9, 10, 11, EOS, 12]])
    state: dict = {}
    for length in range(1, tokens.size(1) + 1):
        step = model.decoder(tokens[:, :length], incremental_state=state)[0][:, -1]
        full = model.decoder(tokens[:, :length])[0][:, -1]
        torch.testing.assert_close(step, full, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "spec", ["rope+documents", "m4m+documents,t5", "t5+documents+window(size=3)"]
)
def test_the_library_is_given_the_documents(spec):
    positions = StackPositions(spec, 16, 2, max_positions=20)
    layer = SelfAttention(positions).eval()
    x = torch.randn(1, 9, 16)
    found, _ = layer(*positions(x, document_ids=torch.tensor([[7, 7, 7, 7, 3, 3, 3, 4, 4]])))
    for start, stop in ((0, 4), (4, 7), (7, 9)):
        own = torch.zeros(1, stop - start, dtype=torch.long)
        alone, _ = layer(*positions(x[:, start:stop], document_ids=own))
        torch.testing.assert_close(found[:, start:stop], alone, rtol=1e-5, atol=1e-6)


def test_documents_hold_for_the_whole_stack():
    model = make_model("masked_lm", position_encoding="rope,none+documents")
    stack = model.encoder.sentence_encoder
    assert str(stack.identity.positions) == "rope+documents,none"
    for kind in (0, 1):
        assert stack.compute_states(torch.tensor([list(chain(*DOCUMENTS))]))[kind].mask.documents


@pytest.mark.parametrize("backend", ["blocked", "triton"])
def test_what_a_backend_cannot_reset_is_refused(backend):
    with pytest.raises(UserError, match=r"each document has one|do not reset|GPU|CUDA"):
        make_model("masked_lm", position_encoding="m4+reset+documents", position_backend=backend)


def test_missing_and_needless_document_ids_are_one_line():
    x = torch.zeros(1, 4, 16)
    with pytest.raises(UserError, match="documents: give document_ids"):
        StackPositions("rope+documents", 16, 2)(x)
    with pytest.raises(UserError, match=r"must have \+documents"):
        StackPositions("rope", 16, 2)(x, document_ids=torch.zeros(1, 4))
    with pytest.raises(UserError, match=r"document_ids \(1, 3\) must be \(1, 4\)"):
        StackPositions("rope+documents", 16, 2)(x, document_ids=torch.zeros(1, 3))
    with pytest.raises(UserError, match="choose one of eos, empty"):
        PositionEncoding("rope+documents(end=x)", 16, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode", "more"),
    [("masked_lm", "complete", ["--include-target-tokens"]), ("causal_lm", "eos", [])],
)
def test_fairseq_trains_and_resumes_on_blocks(family, mode, more, tmp_path):
    spec = "rope+window(size=4)+documents,t5"
    options = ["--position-encoding", spec, "--sample-break-mode", mode, *more]
    (line,) = train(family, *options, "--max-update", 2, save_dir=tmp_path).run.positions()
    assert line.startswith("rope+window(size=4)+documents,t5 | directions")
    again = train(family, *options, "--max-update", 4, save_dir=tmp_path)
    assert "Loaded checkpoint" in again.run.log
    other = ["--position-encoding", "rope+documents,t5"]
    refused = train(family, *options, *other, "--max-update", 6, save_dir=tmp_path, fails=True)
    assert f"trained with {spec}, the model has rope+documents,t5" in refused.run.log


@pytest.mark.slow
def test_text_that_does_not_say_where_documents_end_is_refused(tmp_path):
    by_empty = ["--position-encoding", "rope+documents(end=empty)"]
    refused = train("causal_lm", *by_empty, "--max-update", 1, save_dir=tmp_path, fails=True)
    assert "documents(end=empty): no line of" in refused.run.log
    masked = ["--position-encoding", "rope+documents"]
    refused = train("masked_lm", *masked, "--max-update", 1, save_dir=tmp_path, fails=True)
    assert "a masked </s> would end none" in refused.run.log
