"""Makes fairseq 0.12 work with current numpy; run when fairseq loads the plugin."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from fairseq.data import bucket_pad_length_dataset, data_utils
from fairseq.data.audio import raw_audio_dataset

# numpy 1.24 dropped `float`, numpy 2 `compat`. fairseq 0.12 needs them for --sample-break-mode eos
# (token_block_dataset), --num-batch-buckets (language_pair_dataset), and the CRF of
# non-autoregressive translation (dynamic_crf_layer).
_NAMES = {"compat": SimpleNamespace(long=int), "float": float}


def install_numpy_names() -> None:
    """Add the names that numpy lacks, and replace ``get_buckets`` in fairseq's three modules."""
    for name, value in _NAMES.items():
        if name not in vars(np):
            setattr(np, name, value)
    for module in (data_utils, bucket_pad_length_dataset, raw_audio_dataset):
        module.get_buckets = _get_buckets


def _get_buckets(sizes: Any, num_buckets: int) -> Any:
    """Compute the upper ends of buckets with about the same number of sentences, as fairseq does.

    fairseq's function calls ``percentile(interpolation=...)``, which numpy 2.4 has dropped.
    """
    return np.unique(np.percentile(sizes, np.linspace(0, 100, num_buckets + 1), method="lower")[1:])
