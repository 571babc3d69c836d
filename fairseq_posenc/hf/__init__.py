"""Other positions for models of Hugging Face's transformers."""

from fairseq_posenc.hf.own_positions import read_positions
from fairseq_posenc.hf.set_positions import set_positions

__all__ = ["read_positions", "set_positions"]
