"""The commands of ``fairseq-posenc``: train, compare, fine-tune, translate, convert and report."""

import warnings

# torch warns from 2.15 on about a decorator that fairseq uses.
warnings.filterwarnings("ignore", ".*torch.jit.script", FutureWarning)
