"""Models and named architectures of fairseq's three families."""
