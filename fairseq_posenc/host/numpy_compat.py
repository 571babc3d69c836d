"""Names that fairseq 0.12 uses and numpy has dropped, and a function that numpy refuses.

:func:`~fairseq_posenc.host.startup.prepare` installs them when fairseq loads the plugin.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from fairseq.data import bucket_pad_length_dataset, data_utils
from fairseq.data.audio import raw_audio_dataset

# fairseq 0.12 is older than numpy 1.24, which dropped float, and numpy 2, which dropped compat.
# What fails without them: --sample-break-mode eos (token_block_dataset), --num-batch-buckets
# (language_pair_dataset), and the CRF of non-autoregressive translation (dynamic_crf_layer).
NAMES = {"compat": SimpleNamespace(long=int), "float": float}


def install_numpy_names() -> None:
    """Add the names that numpy lacks, and replace ``get_buckets`` in fairseq's three modules."""
    for name, value in NAMES.items():
        if name not in vars(np):
            setattr(np, name, value)
    for module in (data_utils, bucket_pad_length_dataset, raw_audio_dataset):
        module.get_buckets = _get_buckets


def _get_buckets(sizes: Any, num_buckets: int) -> Any:
    """Compute the upper ends of buckets of about as many sentences each, as fairseq does.

    fairseq calls ``percentile(interpolation=...)``, which numpy 2.4 no longer knows
    (``--num-batch-buckets``).
    """
    return np.unique(np.percentile(sizes, np.linspace(0, 100, num_buckets + 1), method="lower")[1:])
