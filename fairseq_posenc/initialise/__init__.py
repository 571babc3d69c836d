"""A start checkpoint from a trained RoBERTa: its weights, with positions of one's choice.

``target`` makes the wanted one at the source's size,
``matching`` gives it the source's weights and says of each position parameter where it is from, and
``command`` writes the checkpoint.
"""
