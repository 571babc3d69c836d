"""Encoders as ONNX graphs compute what they compute in fairseq, at any length."""

from __future__ import annotations

import pytest
import torch

from fairseq_posenc import registry
from fairseq_posenc.workbench.cli import main
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import checkpoint
from tests.helpers.products import some_of
from tests.helpers.tiny_models import needs_causal
from tests.workbench.convert.test_exchange import padded

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'fairseq-posenc[onnx]'")
pytest.importorskip("onnxscript", reason="pip install 'fairseq-posenc[onnx]'")


SIZES = [
    *(("left", 4, 20), ("right", 3, 11), ("left", 1, 7), ("right", 2, 5), ("left", 6, 40)),
    *(("right", 1, 1), ("right", 3, 2), ("left", 2, 3), ("right", 5, 40)),
]


def graph(trained, code=0):
    """Export a graph; return its folder."""
    out = new_directory() / "out"
    assert main(["export", *_words(trained, out)]) == code
    return out


def _words(trained, out):
    words = ["--checkpoint", trained.path, "--to", "onnx", "--out", out, "--tokens", "words"]
    return [str(word) for word in words]


def ours(trained, tokens):
    with torch.no_grad():
        if trained.model.__class__.__name__ == "PositionalTransformer":
            encoded = trained.model.encoder(tokens, tokens.ne(1).sum(1))
            return encoded["encoder_out"][0].transpose(0, 1)
        return trained.model(tokens)[0]


def difference(folder, trained):
    """Return the largest difference at several sizes: the exporter's, smaller and larger ones.

    The example has five tokens: no window may be lost because it reaches over them.
    """
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    found = []
    for side, rows, longest in SIZES:
        tokens, real = (x[:, :longest] for x in padded(side, rows, longest))
        given = {"input_ids": tokens.numpy(), "attention_mask": real.long().numpy()}
        theirs = torch.from_numpy(session.run(None, given)[0])
        found.append((theirs - ours(trained, tokens))[real].abs().max().item())
    return max(found)


GRAPHS: list[tuple[str, str, dict[str, str]]] = [
    ("masked_lm", "rope(scaling=yarn:4)+m4(reset=true)", {"attention_directions": "lr,rl"}),
    ("translation", "rope(layout=half)+t5", {}),
    ("masked_lm", "t5+window(size=5)+sink,fox", {}),
    ("masked_lm", "rope+window(size=14,first=3),none+ssmax", {}),
    ("masked_lm", "m4m+chunk(size=6)", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "spec", "more"), some_of(GRAPHS[:3], GRAPHS))
def test_a_graph_is_the_model_at_any_length(family, spec, more):
    size = {"max_source_positions": 48} if family == "translation" else {"max_positions": 48}
    trained = checkpoint(family, spec, **size, **more)
    folder = graph(trained)
    assert difference(folder, trained) < 1e-5
    names = {"README.md", "model.onnx", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert "onnxruntime.InferenceSession" in (folder / "README.md").read_text()


def test_a_model_that_writes_is_refused(capsys):
    out = graph(checkpoint("causal_lm", "rope"), code=2)
    assert "one graph has no caches" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []


def test_a_graph_that_differs_is_refused(monkeypatch, capsys):
    from fairseq_posenc.workbench.convert.exchange import onnx_graph as module

    def wrong(trained):
        config = right(trained)
        config["encoder_stack"]["directions"] = ["lr"] * 3
        return config

    right = module.build_config
    monkeypatch.setattr(module, "build_config", wrong)
    out = graph(checkpoint("masked_lm", "m4m"), code=2)
    assert "the graph differs from the model by" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []


def test_what_cannot_be_a_graph_is_told_in_a_line(capsys):
    out = graph(checkpoint("masked_lm", "sentence_learned"), code=2)
    error = capsys.readouterr().err
    assert "sentence_learned cannot become a graph: No ONNX function found for" in error
    assert len([line for line in error.splitlines() if "error:" in line]) == 1
    assert list(out.parent.iterdir()) == []


def table():
    """Print the largest difference of each encoding's graphs."""
    for name in registry.names():
        if not needs_causal(name):
            trained = checkpoint("masked_lm", name)
            code = main(["export", *_words(trained, out := new_directory() / "out")])
            print(name, "refused" if code else f"{difference(out, trained):.0e}", flush=True)


if __name__ == "__main__":
    table()
