"""Writes data sets of fairseq in its mmap format: ``.bin`` has the tokens, ``.idx`` the sizes."""

import struct
from pathlib import Path

import numpy as np
from fairseq.data.indexed_dataset import MMapIndexedDataset, _dtype_header_code

from fairseq_posenc.tokens.tokenizer import Encoded


def write_items(prefix: Path, items: Encoded) -> None:
    """Write ``PREFIX.bin`` and ``PREFIX.idx``; the tokens have the type of the dictionary."""
    items.tokens.tofile(f"{prefix}.bin")
    write_index(Path(f"{prefix}.idx"), items.sizes, items.tokens.dtype)


def write_index(path: Path, sizes: np.ndarray, dtype: np.dtype) -> None:
    """Write an index as fairseq does, whose lists would need 40 bytes of memory and more an item.

    Args:
        path: the ``.idx`` file.
        sizes: number of tokens of each of N items, ``[N]``, int32.
        dtype: type of the tokens.
    """
    places = np.zeros(len(sizes), np.int64)  # of the first bytes of the items
    np.cumsum(sizes[:-1], out=places[1:])
    places *= dtype.itemsize
    with open(path, "wb") as file:
        version = 1
        file.write(MMapIndexedDataset.Index._HDR_MAGIC)
        file.write(struct.pack("<QBQ", version, _dtype_header_code(dtype.type), len(sizes)))
        sizes.tofile(file)
        places.tofile(file)
