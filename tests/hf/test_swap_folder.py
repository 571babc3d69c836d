"""``swap`` gives a folder of transformers other positions, and keeps all else, without fairseq."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.workbench.cli import main
from tests.helpers.commands import run
from tests.helpers.hf_models import MODELS, compute_logits, distance, make_inputs


@pytest.fixture
def stock(tmp_path: Path) -> PreTrainedModel:
    model = MODELS["llama"].build()
    model.save_pretrained(tmp_path / "stock")
    (tmp_path / "stock" / "vocab.json").write_text("{}", encoding="utf-8")
    return model


def swap(folder: Path, *words: Any, source: str = "stock") -> PreTrainedModel:
    out = folder / "swapped"
    assert main(["swap", *map(str, ["--checkpoint", folder / source, "--out", out, *words])]) == 0
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(out)
    return model


def test_a_folder_gets_other_positions(
    stock: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = swap(tmp_path, "--position-encoding", "own+t5,own", "--max-positions", 128)
    assert read_positions(model) == "rope(layout=half)+t5,rope(layout=half)"
    assert model.config.position_encoding_max_positions == 128
    for name, weight in stock.named_parameters():
        assert torch.equal(model.get_parameter(name), weight), name
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM, positions: rope(layout=half)\n" in printed
    assert "only in the new model: model.positions.shared.t5.table (4, 32)" in printed
    assert "positions: rope(layout=half)+t5,rope(layout=half) (max_positions 128)" in printed
    assert "AutoModelForCausalLM.from_pretrained after `import fairseq_posenc.hf` (and" in printed
    assert (tmp_path / "swapped" / "vocab.json").read_text(encoding="utf-8") == "{}"
    modes = {path.stat().st_mode for path in (tmp_path / "swapped").iterdir()}
    assert len(modes) == 1  # all are for the same readers
    inputs = make_inputs(MODELS["llama"])
    again = set_positions(stock, read_positions(model), 128)
    again.load_state_dict(model.state_dict())
    assert torch.equal(compute_logits(again, inputs), compute_logits(model, inputs))


def test_a_trained_table_becomes_longer(
    stock: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = len(dict(stock.named_parameters()))
    shared = set_positions(stock, "learned+t5").get_parameter("model.positions.shared.t5.table")
    torch.nn.init.normal_(shared)
    stock.save_pretrained(tmp_path / "stock")
    name = "model.positions.input.learned.table.weight"
    table = stock.get_parameter(name)
    model = swap(tmp_path, "--max-positions", 2 * len(table), "--extend", "copy")
    assert torch.equal(model.get_parameter(name), torch.cat([table, table]))
    assert torch.equal(model.get_parameter("model.positions.shared.t5.table"), shared)
    printed = capsys.readouterr().out
    assert f"the {others} tensors that are not positions\n" in printed
    assert f"resized: {name} {tuple(table.shape)} -> {(2 * len(table), 32)}\n" in printed
    assert "kept: model.positions.shared.t5.table (4, 32)\n" in printed


def test_a_table_of_other_options_is_called_initialized(
    stock: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_positions(stock.model, "fire").save_pretrained(tmp_path / "stock")
    swap(tmp_path, "--position-encoding", "fire(threshold=8)")
    printed = capsys.readouterr().out
    assert "kept bit for bit: the 38 tensors" in printed
    assert "load it by AutoModel.from_pretrained after" in printed  # it has no head
    assert "initialized: layers.0.self_attn.positions.encodings.fire." in printed


def test_only_files_of_the_tokenizer_are_copied(stock: PreTrainedModel, tmp_path: Path) -> None:
    copied = {"vocab.json", "tekken.json", "tokenizer.tiktoken", "chat_template.json"}
    others = {"tf_model.h5", "m.gguf", "evil.py", "data.pkl", ".netrc", "training_args.bin"}
    for name in copied | others:
        (tmp_path / "stock" / name).touch()
    (tmp_path / "swapped").mkdir()  # an empty folder is filled
    swap(tmp_path, "--position-encoding", "alibi")
    names = {path.name for path in (tmp_path / "swapped").iterdir()} - {"README.md"}
    written = {"config.json", "generation_config.json", "model.safetensors", "positions_loader.py"}
    assert names == written | copied


def test_own_positions_are_the_same_model(
    stock: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = make_inputs(MODELS["llama"])
    logits = compute_logits(stock, inputs)
    assert distance(compute_logits(swap(tmp_path, "--max-positions", 128), inputs), logits) < 1e-5
    printed = capsys.readouterr().out
    assert "swapped, a stock folder (LlamaForCausalLM): positions: rope(layout=half) (" in printed
    (tmp_path / "swapped").rename(tmp_path / "before")
    assert read_positions(swap(tmp_path, "--position-encoding", "none", source="before")) == "none"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--position-encoding", ""], "cannot read position encoding ''"),
        (["--position-encoding", "none", "--seed", str(2**64)], "from 0 to 2^64 - 1"),
        (["--position-encoding", "none", "--seed=-1"], "--seed -1: give"),
        (["--position-encoding", "owl"], "unknown position encoding 'owl'"),
        (["--position-encoding", "own(size=3)"], "no option 'size'"),
        (["--position-encoding", "own(bas=3)"], "no option 'bas'; did you mean base? they are"),
        (["--spec", "alibi"], "arguments: --spec alibi (see fairseq-posenc swap --help)"),
        ([], "nothing to swap: give --position-encoding or --max-positions"),
        (["--max-positions", "9", "--checkpoint", "nosuch"], "--checkpoint nosuch: no config"),
        (["--max-positions", "9", "--checkpoint", "/"], "(`hf download` prints one), or use f"),
    ],
)
@pytest.mark.usefixtures("stock")
def test_what_cannot_be_swapped_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = ["--checkpoint", tmp_path / "stock", "--out", tmp_path / "p/q/r", *words]
    assert main(["swap", *map(str, written)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]
    assert message in capsys.readouterr().err


def test_nothing_is_replaced(
    stock: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--checkpoint", tmp_path / "stock", "--position-encoding", "alibi"]
    assert main(["swap", *map(str, [*words, "--out", tmp_path / "stock"])]) == 2
    assert "name another folder" in capsys.readouterr().err
    assert read_positions(AutoModelForCausalLM.from_pretrained(tmp_path / "stock")) != "alibi"


@pytest.mark.slow
def test_a_folder_needs_no_fairseq(stock: PreTrainedModel, tmp_path: Path) -> None:
    code = (
        "import sys; loaded = [x for x in sys.modules if x.startswith('fairseq.')]; "
        "sys.modules.update(dict.fromkeys(['fairseq', *loaded])); "
        "from fairseq_posenc.workbench.cli import main; raise SystemExit(main(sys.argv[1:]))"
    )
    words = ["swap", "--checkpoint", tmp_path / "stock", "--position-encoding", "window"]
    said = run("python", "-c", code, *words, "--out", tmp_path / "new", warnings="default").err
    assert re.search("^fairseq-posenc: warning: set_positions: .* no positions now", said, re.M)
    assert read_positions(AutoModelForCausalLM.from_pretrained(tmp_path / "new")) == "window"
