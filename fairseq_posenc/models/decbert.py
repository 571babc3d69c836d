"""DecBERT's architectures by name; imports nothing, so that commands without fairseq know them."""

# Directions of the first layers, each with learned positions or without.
DECBERT = {"decbert_same": "lr,lr", "decbert_diff": "lr,rl"}
