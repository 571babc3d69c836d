"""Hold an implementation against the reference vectors; needs numpy alone.

    python check.py mine.npz

``mine.npz`` has arrays under the names of the vectors' outputs, such as ``rope/scores``; what it
has not is not compared. Exit code 1: an array is more than 1e-5 away.
"""

import json
import sys
from pathlib import Path

import numpy as np

data = Path(__file__).with_name("vectors.safetensors").read_bytes()
start = 8 + int.from_bytes(data[:8], "little")
header, far = json.loads(data[8:start]), 0
for name, mine in np.load(sys.argv[1]).items():
    first, last = header[name]["data_offsets"]
    kind = {"F64": "<f8", "I64": "<i8", "BOOL": "?"}[header[name]["dtype"]]
    theirs = np.frombuffer(data[start:][first:last], kind).reshape(header[name]["shape"])
    away = np.inf
    if mine.shape == theirs.shape:
        gaps = np.abs(mine - theirs)[~np.isnan(theirs)]  # NaN is padding, and not compared
        away = np.nan_to_num(gaps, nan=np.inf).max(initial=0.0)
    far += away > 1e-5
    print(f"{name}\t{away:.1e}")
sys.exit(int(far > 0))
