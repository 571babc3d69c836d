"""Perplexity of causal language models against context length (``fairseq-posenc lm-length``)."""
