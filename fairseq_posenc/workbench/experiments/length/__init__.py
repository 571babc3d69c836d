"""Measures the perplexity of causal LMs by context length (``fairseq-posenc lm-length``)."""
