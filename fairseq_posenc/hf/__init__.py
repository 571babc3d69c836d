"""Other positions for models of Hugging Face's transformers."""

from fairseq_posenc.hf.set_positions import set_positions

__all__ = ["set_positions"]
