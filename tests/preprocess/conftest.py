"""The programs of ``preprocess/`` find their modules beside them; so do these tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "preprocess"))
