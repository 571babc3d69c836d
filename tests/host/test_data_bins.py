"""Damaged data-bins: a line that says what is wrong, from every command that reads one."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import data_utils, indexed_dataset

from fairseq_posenc.errors import UserError
from fairseq_posenc.host.checks import check_data_bin
from tests.helpers.commands import sentences, train
from tests.helpers.products import product_of

SIZES = (3, 1, 4, 1, 5)
POINTERS = 26 + 4 * len(SIZES)  # 26: bytes of an index before its sizes


def write_split(folder: Path, dtype: type = np.uint16, sizes: tuple[int, ...] = SIZES) -> Path:
    """Write a split with fairseq's own writer; return its index."""
    builder = indexed_dataset.MMapIndexedDatasetBuilder(str(folder / "valid.bin"), dtype)
    for number, size in enumerate(sizes):
        builder.add_item(torch.full((size,), number + 4))
    builder.finalize(str(folder / "valid.idx"))
    return folder / "valid.idx"


def put(offset: int, form: str, value: int | bytes) -> Callable[[bytes], bytes]:
    """Return a damage: a number or some bytes written over an index."""

    def damage(content: bytes) -> bytes:
        number = struct.pack(form, value)
        offset_from_start = offset % len(content)
        return content[:offset_from_start] + number + content[offset_from_start + len(number) :]

    return damage


def keep(size: int) -> Callable[[bytes], bytes]:
    """Return a damage: a file cut off, or with more behind it."""
    return lambda content: content[:size] if size < len(content) else content + b"\0" * 8


INDEXES = {
    "unknown type": (put(17, "B", 99), "fairseq cannot read it"),
    "lower count": (put(18, "<Q", 4), "86 bytes, not the 74 of 4 sentences"),
    "size at the end": (put(POINTERS - 4, "<i", 6), "valid.bin has 28 bytes, .* have 30"),
    "last pointer": (put(-8, "<q", 20), "valid.bin has 28 bytes, .* have 30"),
    "half a header": (keep(12), "fairseq cannot read it"),
    "half the pointers": (keep(POINTERS + 11), "fairseq cannot read it"),
    "more behind it": (keep(1000), "94 bytes, not the 86"),
}
DATA = {
    "empty": (keep(0), "valid.bin has 0 bytes, and its sentences have 28"),
    "one byte less": (keep(27), "valid.bin has 27 bytes, and its sentences have 28"),
    "half": (keep(14), "valid.bin has 14 bytes"),
    "more behind it": (keep(1000), "valid.bin has 36 bytes"),
}
DAMAGES = {
    **{f"index, {name}": (".idx", *case) for name, case in INDEXES.items()},
    **{f"data, {name}": (".bin", *case) for name, case in DATA.items()},
}


def break_file(path: Path, damage: Callable[[bytes], bytes]) -> None:
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before


@pytest.mark.parametrize(("suffix", "damage", "says"), DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_split_is_refused(suffix, damage, says, tmp_path):
    index = write_split(tmp_path)
    break_file(index.with_suffix(suffix), damage)
    with pytest.raises(UserError, match=rf"^{index} is damaged: .*{says}.*\Z"):  # in a line
        check_data_bin(index)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
@pytest.mark.parametrize("sizes", [(1,), SIZES, (0, 2, 0, 3), tuple(range(1, 300))])
def test_what_fairseq_wrote_is_read_as_it_is(dtype, sizes, tmp_path):
    check_data_bin(write_split(tmp_path, dtype, sizes))
    split = data_utils.load_indexed_dataset(str(tmp_path / "valid"))
    assert [len(each) for each in split] == list(sizes)
    assert all(set(each.tolist()) <= {number + 4} for number, each in enumerate(split))


@pytest.mark.parametrize("name", ["valid.idx", "valid.bin"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, partial(os.symlink, "/dev/zero")])
def test_what_is_no_file_is_not_waited_for(make, name, tmp_path):
    index = write_split(tmp_path)
    (tmp_path / name).unlink()
    make(tmp_path / name)
    with pytest.raises(UserError, match=f"{name}: is not a file"):
        check_data_bin(index)


def test_a_split_without_sentences_is_refused(tmp_path):
    index = write_split(tmp_path, sizes=())
    with pytest.raises(UserError, match=r"valid.bin is empty: the split has no sentences"):
        check_data_bin(index)


def test_a_link_to_a_whole_split(tmp_path):
    (tmp_path / "real").mkdir()
    index = write_split(tmp_path / "real")
    for suffix in (".idx", ".bin"):
        (tmp_path / f"linked{suffix}").symlink_to(index.with_suffix(suffix))
    check_data_bin(tmp_path / "linked.idx")


COMMANDS = ["index, half the pointers", "data, half"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split", "more"),
    product_of(COMMANDS, [("train", []), ("valid", []), ("train", ["--dataset-impl", "mmap"])]),
)
def test_train_refuses_a_damaged_data_bin(split, more, name, tmp_path):
    copied = shutil.copytree(sentences(), tmp_path / "bin")
    suffix, damage, _ = DAMAGES[name]
    break_file(copied / f"{split}{suffix}", damage)
    done = train("causal_lm", *more, data=copied, fails=True)
    assert f"{copied / split}.idx is damaged: " in done.run.error()
