"""``fairseq-posenc train-recipe``: a paper's training, with any encoding, on any number of GPUs."""
