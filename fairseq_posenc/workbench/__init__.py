"""The commands of ``fairseq-posenc``: train, compare, fine-tune, translate, convert and report."""

import logging
import warnings

# fairseq's import makes a root logger without a handler show every INFO message.
logging.basicConfig(level=logging.WARNING)
# torch warns from 2.15 on about a decorator that fairseq uses.
warnings.filterwarnings("ignore", ".*torch.jit.script", FutureWarning)
