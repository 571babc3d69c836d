"""Files of a few bytes that ask for much, and files that are not as they were written."""

from __future__ import annotations

import io
import pickle
import re
import resource
import struct
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_posenc.checkpoints.dictionary import check_text_kind
from fairseq_posenc.checkpoints.safe_loading import open_checkpoint, open_mapped
from fairseq_posenc.errors import UserError
from fairseq_posenc.host.audit_hook import refuse_unsafe_checkpoint
from fairseq_posenc.workbench.loading.checkpoints import load_state

COOKIE = b"#coding:utf-7\n[1#+AAo-,__import__('os').getpid()]"


def in_settings(value: Any) -> dict[str, Any]:
    return {"model": {}, "cfg": {"model": Namespace(adaptive_softmax_cutoff=value)}}


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def doubled(times: int) -> Any:
    """Return lists in lists that are few in a file, and 2^times where they are copied."""
    value: Any = [0]
    for _ in range(times):
        value = [value, value]
    return value


def save(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


def write_pickle(path: Path, pickled: bytes) -> Path:
    """Write a checkpoint with another pickle than torch would write."""
    buffer = io.BytesIO()
    torch.save({"model": {}}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))
    return path


def call(module: str, name: str, arguments: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + arguments + b"R"


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def numpy_number(code: str) -> bytes:
    """Return the pickle of a number of numpy's without its bytes."""
    kind = call("numpy", "dtype", b"(" + text(code) + b"\x89\x88t")
    return call("numpy.core.multiarray", "scalar", b"(" + kind + b"t")


# A call that torch takes and no checkpoint has: what follows it must not be left untried.
UNKNOWN = call("_codecs", "encode", b"(" + text("a") + text("latin1") + text("strict") + b"t")


def hexadecimal(times: int) -> bytes:
    content = text("0" * 64)
    content = call("_codecs", "encode", content + text("latin1") + b"\x86")
    for _ in range(times):
        content = call("_codecs", "encode", content + text("hex") + b"\x86")
    return content


SETTINGS: dict[str, tuple[Any, str]] = {
    "bytes": (b"[1]", "model.adaptive_softmax_cutoff is of the type bytes"),
    "bytes with a coding": (COOKIE, "model.adaptive_softmax_cutoff is of the type bytes"),
    "a coding": (COOKIE.decode("latin1"), "would be run as code"),
    "a set": ({1}, "of the type set"),
    "a complex number": (1j, "of the type complex"),
    "a tensor": (torch.ones(1), "of the type Tensor"),
    "a type of numbers": (torch.float32, "of the type dtype"),
    "a device": (torch.device("cpu"), "of the type device"),
    "a size": (torch.Size([1]), "of the type Size"),
    "numpy's number": (np.float64(1), "of the type float64"),
    "bytes in a list": ([COOKIE], "model.adaptive_softmax_cutoff.0 is of the type bytes"),
    "bytes in a tuple": ((1, (COOKIE,)), "adaptive_softmax_cutoff.1.0 is of the type bytes"),
    "bytes in a mapping": ({"a": COOKIE}, "adaptive_softmax_cutoff.a is of the type bytes"),
    "bytes as a name": ({b"a": 1}, "have an invalid name"),
    "a name of two lines": ({"a\nb": 1}, "have an invalid name"),
    "an endless number": (1 << 1_000, "is a number of 1,001 bits"),
    "a million numbers": (list(range(1_000_000)), "more than 20,000 settings"),
    "nested": (nested(400), "nested more than 32 deep"),
    "copied": (doubled(40), "nested more than 32 deep|more than 20,000 settings"),
    "copied, not deep": (doubled(28), "more than 20,000 settings"),
}


@pytest.mark.parametrize("form", SETTINGS)
def test_settings_of_other_types_are_refused_by_name(form, tmp_path):
    value, message = SETTINGS[form]
    path = save(tmp_path / "a.pt", in_settings(value))
    start = time.process_time()
    for read in (refuse_unsafe_checkpoint, lambda file: load_state(file, "--checkpoint")):
        with pytest.raises(UserError, match=message) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert time.process_time() - start < 8


PICKLES = {
    **{f"numpy's {code}": numpy_number(code) for code in ("V5000000000", "S4000000000", "O", "M8")},
    "a buffer": call("builtins", "bytearray", b"(J\xff\xff\xff\x7ft"),
    "a buffer by its old name": call("__builtin__", "bytearray", b"(J\xff\xff\xff\x7ft"),
    "a tensor": call("torch", "FloatTensor", b"(J\xff\xff\xff\x7ft"),
    "a storage": call("torch.storage", "UntypedStorage", b"(J\xff\xff\xff\x7ft"),
    "text that grows": hexadecimal(26),
    "a buffer behind a call": UNKNOWN
    + call("builtins", "bytearray", b"(J\xff\xff\xff\x7ft")
    + b"\x86",
    "a tensor behind a call": UNKNOWN
    + call("torch", "FloatTensor", b"(J\xff\xff\xff\x7ft")
    + b"\x86",
    "text that grows behind a call": UNKNOWN + hexadecimal(26) + b"\x86",
}


@pytest.mark.parametrize("form", PICKLES)
def test_few_bytes_take_little_memory(form, tmp_path):
    path = write_pickle(tmp_path / "a.pt", b"\x80\x02}" + text("cfg") + PICKLES[form] + b"s.")
    assert path.stat().st_size < 5_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reason = "it encodes text|it builds a buffer or a tensor|a number of numpy's type"
    with pytest.raises(UserError, match=rf"a\.pt: .*({reason})"), open_checkpoint(path):
        pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


def test_contents_of_old_files_that_are_too_long_to_check_are_refused(tmp_path):
    path = tmp_path / "long.pt"
    torch.save({"model": {}, "text": "x" * 2**25}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="its contents are too long"):
        open_mapped(path)


def test_a_pickle_of_old_files_is_tried_too(tmp_path):
    mark, version = (pickle.dumps(n, 2) for n in (0x1950A86A20F9469CFC6C, 1001))
    sizes = pickle.dumps({"little_endian": True}, 2)
    content = b"\x80\x02" + PICKLES["a buffer"] + b"."
    (tmp_path / "a.pt").write_bytes(mark + version + sizes + content)
    with pytest.raises(UserError, match="it builds a buffer"):
        open_mapped(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("what", "key", "wrong"),
    [
        ("", "nothing", "KeyError"),
        ("--checkpoint", "nothing", "KeyError"),
        ("--init", "extra_state", "TypeError"),
    ],
)
def test_what_a_checkpoint_lacks_is_a_line_of_its_name(what, key, wrong, tmp_path):
    path = save(tmp_path / "a.pt", {"model": {}, "extra_state": None})
    start = re.escape(f"{what} {path}: not a complete checkpoint of fairseq ({wrong}".lstrip())
    with pytest.raises(UserError, match=f"^{start}"), open_checkpoint(path, what) as found:
        found[key]["val_loss"]


def test_settings_of_fairseq_are_read_wherever_fairseq_is_not(tmp_path):
    """What torch may load is said where it loads it, and not only as fairseq starts."""
    path = save(tmp_path / "a.pt", {"model": {}, "args": Namespace(arch="x")})
    program = (
        "import sys; from pathlib import Path\n"
        "from fairseq_posenc.checkpoints.safe_loading import open_mapped\n"
        "print(open_mapped(Path(sys.argv[1]))['args'].arch, 'fairseq' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["x", "False"]


def test_numbers_of_metrics_are_read(tmp_path):
    numbers = [np.float64(0.1), np.float32(0.1), np.int64(-3), np.dtype(">f8").type(0.25)]
    state = {"model": {}, "best": numbers, "args": None}
    read = open_mapped(save(tmp_path / "a.pt", state))["best"]
    assert read == numbers
    assert [type(number) for number in read] == [type(number) for number in numbers]


WEIGHT = "decoder.layers.0.fc1.weight"


@pytest.mark.parametrize("bit", [0, 3, 7])
@pytest.mark.parametrize("at", [0, 77, 4_095])
def test_a_flipped_bit_of_a_weight_is_noticed(at, bit, tmp_path):
    weights = {"decoder.embed_tokens.weight": torch.ones(8, 8), WEIGHT: torch.randn(32, 32)}
    state = {"model": weights, "cfg": {"model": Namespace(), "task": {}}}
    path = save(tmp_path / "a.pt", state)
    refuse_unsafe_checkpoint(path)
    content = bytearray(path.read_bytes())
    content[content.index(weights[WEIGHT].numpy().tobytes()) + at] ^= 1 << bit
    path.write_bytes(content)
    open_mapped(path)  # whoever looks for settings alone does not read them
    for read in (refuse_unsafe_checkpoint, lambda file: load_state(file, "--checkpoint")):
        with pytest.raises(UserError, match=f"a.pt: the checkpoint is damaged: {WEIGHT} does"):
            read(path)


def test_a_flipped_byte_of_settings_is_noticed_by_all(tmp_path):
    path = save(tmp_path / "a.pt", {"model": {}, "extra_state": {"val_loss": "0.123456789"}})
    path.write_bytes(path.read_bytes().replace(b"0.123456789", b"0.123456788"))
    with pytest.raises(UserError, match=r"damaged: its part .*data.pkl"):
        open_mapped(path)


def test_files_without_checksums_are_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        save(tmp_path / "a.pt", {"model": {WEIGHT: torch.ones(3)}})
    finally:
        torch.serialization.set_crc32_options(True)
    assert open_mapped(tmp_path / "a.pt", for_weights=True)["model"][WEIGHT].sum() == 3


def test_a_pickle_is_checked_whatever_the_case_of_its_name(tmp_path):
    """torch ignores the case, so it would read this pickle."""
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/DATA.PKL", b"\x80\x02cbuiltins\nbytearray\nK\x09\x85R.")
        archive.writestr("a/version", "3")
    with pytest.raises(UserError, match="builds a buffer"):
        open_mapped(path)


def test_two_parts_of_one_name_are_refused(tmp_path):
    path = write_pickle(tmp_path / "a.pt", b"\x80\x02}.")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/DATA.pkl", b"\x80\x02}.")
    with pytest.raises(UserError, match="two parts of the same name"):
        open_mapped(path)


def test_a_damaged_manifest_still_says_that_its_data_are_questions(tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\n")
    (tmp_path / "manifest.json").write_bytes(b'{"windows": "\xff')
    with pytest.raises(UserError, match="has the questions of SQuAD"):
        check_text_kind(tmp_path, pairs=False, reader="--task masked_lm")
