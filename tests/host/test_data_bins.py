"""Damaged data-bins: a line that says what is wrong, from every command that reads one."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import data_utils, indexed_dataset

from fairseq_posenc.errors import UserError
from fairseq_posenc.host.data_bins import check_data_bin
from tests.helpers.commands import FAMILIES, TRAINING, USER_DIR, run, sentences
from tests.helpers.products import product_of

SIZES = (3, 1, 4, 1, 5)
HEADER = 26  # bytes of an index before its sizes
POINTERS = HEADER + 4 * len(SIZES)
TYPES = {"uint16": np.uint16, "uint32": np.uint32, "int64": np.int64}


def write_split(folder: Path, dtype: type = np.uint16, sizes: tuple[int, ...] = SIZES) -> Path:
    """Write a split with fairseq's own writer; return its index."""
    builder = indexed_dataset.MMapIndexedDatasetBuilder(str(folder / "valid.bin"), dtype)
    for number, size in enumerate(sizes):
        builder.add_item(torch.full((size,), number + 4))
    builder.finalize(str(folder / "valid.idx"))
    return folder / "valid.idx"


def write_legacy_split(folder: Path) -> Path:
    """Write a split of --dataset-impl cached with fairseq's own writer; return its index."""
    builder = indexed_dataset.IndexedDatasetBuilder(str(folder / "valid.bin"))
    for number, size in enumerate(SIZES):
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
    "other file": (put(0, "8s", b"PK\3\4abcd"), "does not start like an index of fairseq"),
    "ninth byte": (put(8, "B", 1), "was not written to its end"),
    "version": (put(9, "<Q", 2), "of version 2, not 1"),
    "version of 20 digits": (put(9, "<Q", 2**64 - 1), "of version 18446744073709551615"),
    "no type": (put(17, "B", 0), "tokens are of type 0"),
    "unknown type": (put(17, "B", 99), "tokens are of type 99"),
    "floats": (put(17, "B", 7), "tokens are of type 7"),
    "wider type": (put(17, "B", 4), "sentence 2 begins at 6, not at 12"),
    "narrower type": (put(17, "B", 1), "sentence 2 begins at 6, not at 3"),
    "no count": (put(18, "<Q", 0), "86 bytes, not the 26 of 0 sentences"),
    "lower count": (put(18, "<Q", 4), "86 bytes, not the 74 of 4 sentences"),
    "higher count": (put(18, "<Q", 6), "86 bytes, not the 98 of 6 sentences"),
    "count of 20 digits": (put(18, "<Q", 2**64 - 1), "18,446,744,073,709,551,615 sentences"),
    "negative size": (put(HEADER + 8, "<i", -4), "sentence 3 has -4 tokens"),
    "negative size at the end": (put(POINTERS - 4, "<i", -5), "sentence 5 has -5 tokens"),
    "size of zero": (put(HEADER, "<i", 0), "sentence 2 begins at 6, not at 0"),
    "size of zero at the end": (put(POINTERS - 4, "<i", 0), "valid.bin has 28 bytes, .* 18"),
    "size that is too large": (put(HEADER + 4, "<i", 2**31 - 1), "sentence 3 begins at 8, not"),
    "size at the end": (put(POINTERS - 4, "<i", 6), "valid.bin has 28 bytes, .* have 30"),
    "first pointer": (put(POINTERS, "<q", 2), "sentence 1 begins at 2, not at 0"),
    "pointer out of range": (put(POINTERS + 16, "<q", 10**15), "sentence 3 begins at 1,000,000"),
    "negative pointer": (put(POINTERS + 16, "<q", -2), "sentence 3 begins at -2, not at 8"),
    "last pointer": (put(-8, "<q", 20), "sentence 5 begins at 20, not at 18"),
    "empty": (keep(0), "does not start like an index"),
    "header alone": (keep(HEADER), "26 bytes, not the 86"),
    "half a header": (keep(12), "was not written to its end"),
    "magic alone": (keep(8), "was not written to its end"),
    "half the sizes": (keep(HEADER + 6), "32 bytes, not the 86"),
    "half the pointers": (keep(POINTERS + 11), "57 bytes, not the 86"),
    "one byte less": (keep(85), "85 bytes, not the 86"),
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
each_damage = pytest.mark.parametrize(
    ("suffix", "damage", "says"), DAMAGES.values(), ids=list(DAMAGES)
)


def break_file(path: Path, damage: Callable[[bytes], bytes]) -> None:
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before


@each_damage
def test_fairseq_is_kept_from_a_damaged_split(suffix, damage, says, tmp_path):
    index = write_split(tmp_path)
    break_file(index.with_suffix(suffix), damage)
    with pytest.raises(UserError, match=says) as caught:
        data_utils.load_indexed_dataset(str(tmp_path / "valid"), dataset_impl=None)
    assert str(caught.value).startswith(f"{index} is damaged: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=list(TYPES))
@pytest.mark.parametrize("sizes", [(1,), SIZES, (0, 2, 0, 3), tuple(range(1, 300))])
def test_what_fairseq_wrote_is_read_as_it_is(dtype, sizes, tmp_path):
    write_split(tmp_path, dtype, sizes)
    split = data_utils.load_indexed_dataset(str(tmp_path / "valid"))
    assert [len(each) for each in split] == list(sizes)
    assert all(set(each.tolist()) <= {number + 4} for number, each in enumerate(split))


LEGACY = {
    "version": (put(8, "<Q", 0), "of version 0"),
    "type": (put(16, "<Q", 99), "type 99"),
    "size of a token": (put(24, "<Q", 2), "of type 4 have 2 bytes"),
    "count": (put(32, "<Q", 9), "9 sentences"),
    "dimensions": (put(40, "<Q", 9), "bytes, not the"),
    "negative size": (put(-8, "<q", -5), "sentence 5 has -5 tokens"),
    "size": (put(-16, "<q", 7), "sentence 4 begins at"),
    "offset": (put(48 + 8 * 6 + 8, "<q", 99), "sentence 1 begins at 96, not at 0"),
    "cut off": (keep(100), "100 bytes, not the"),
}


@pytest.mark.parametrize(("damage", "says"), LEGACY.values(), ids=list(LEGACY))
def test_a_damaged_split_of_the_older_format(damage, says, tmp_path):
    index = write_legacy_split(tmp_path)
    split = data_utils.load_indexed_dataset(str(tmp_path / "valid"))
    assert list(split.sizes) == list(SIZES)
    break_file(index, damage)
    with pytest.raises(UserError, match=says):
        data_utils.load_indexed_dataset(str(tmp_path / "valid"))


@pytest.mark.parametrize("name", ["valid.idx", "valid.bin"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_not_waited_for(kind, name, tmp_path):
    write_split(tmp_path)
    (tmp_path / name).unlink()
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"{name}: is not a file"):
        data_utils.load_indexed_dataset(str(tmp_path / "valid"))


def test_a_split_without_sentences_is_refused_and_its_index_alone_is_read(tmp_path):
    index = write_split(tmp_path, sizes=())
    assert len(indexed_dataset.MMapIndexedDataset.Index(str(index))) == 0  # as fairseq merges parts
    with pytest.raises(UserError, match=r"valid.bin is empty: the split has no sentences"):
        data_utils.load_indexed_dataset(str(tmp_path / "valid"))


def test_each_state_of_the_files_is_checked(tmp_path):
    index = write_split(tmp_path)
    check_data_bin(index)
    break_file(index, put(-8, "<q", 20))
    with pytest.raises(UserError, match="sentence 5"):
        check_data_bin(index)


def test_a_link_to_a_whole_split(tmp_path):
    (tmp_path / "real").mkdir()
    index = write_split(tmp_path / "real")
    for suffix in (".idx", ".bin"):
        (tmp_path / f"linked{suffix}").symlink_to(index.with_suffix(suffix))
    split = data_utils.load_indexed_dataset(str(tmp_path / "linked"))
    assert len(split) == len(SIZES)


# ------------------------------------------------------------------------------------ commands


COMMANDS = ["index, negative size", "index, floats", "index, half the pointers", "data, half"]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Copy the shared data-bin."""
    return Path(shutil.copytree(sentences(), tmp_path / "bin"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split", "more"),
    product_of(COMMANDS, [("train", []), ("valid", []), ("train", ["--dataset-impl", "mmap"])]),
)
def test_train_refuses_a_damaged_data_bin(split, more, name, copied, tmp_path):
    suffix, damage, _ = DAMAGES[name]
    break_file(copied / f"{split}{suffix}", damage)
    chosen = FAMILIES["causal_lm"]
    options = [*chosen.task, *chosen.model, *TRAINING, "--save-dir", tmp_path / "checkpoints"]
    done = run("fairseq-train", copied, "--user-dir", USER_DIR, *options, *more, fails=True)
    assert f"{copied / split}.idx is damaged: " in done.error()
