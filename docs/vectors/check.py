"""Hold an implementation against the reference vectors; needs numpy alone.

    python check.py mine.npz

``mine.npz`` has arrays under the names of the vectors' outputs, ``rope/scores`` for one; what it
does not have is not compared. The exit code is 1 if an array is more than 1e-5 away.
"""

import json
import sys
from pathlib import Path

import numpy as np

VECTORS = Path(__file__).with_name("vectors.safetensors")
TYPES = {"F64": "<f8", "I64": "<i8", "BOOL": "?"}


def load(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file by name."""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    arrays = {}
    for name, entry in json.loads(data[8:start]).items():
        first, last = (start + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[first:last], TYPES[entry["dtype"]])
        arrays[name] = array.reshape(entry["shape"])
    return arrays


def difference(mine: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference; NaN in the vectors is padding, and not compared."""
    if mine.shape != theirs.shape:
        return np.inf
    real = ~np.isnan(theirs)
    return float(np.max(np.nan_to_num(np.abs(mine - theirs)[real], nan=np.inf), initial=0.0))


if __name__ == "__main__":
    expected, far = load(VECTORS), False
    for name, array in np.load(sys.argv[1]).items():
        found = difference(array, expected[name])
        far |= found > 1e-5
        print(f"{name}\t{found:.1e}")
    sys.exit(1 if far else 0)
