"""Our parts of fairseq's Transformer: attention, stacks, options, and what loading needs."""
