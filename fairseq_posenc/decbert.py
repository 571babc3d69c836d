"""Lists DecBERT's architectures; without imports, for commands that run without fairseq."""

# Attention directions of the first two layers by architecture: left to right (lr) or back (rl).
DECBERT = {"decbert_same": "lr,lr", "decbert_diff": "lr,rl"}
