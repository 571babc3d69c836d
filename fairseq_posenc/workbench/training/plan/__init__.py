"""What a training will need, measured on its first updates (``fairseq-posenc plan``)."""
