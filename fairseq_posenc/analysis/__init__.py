"""Looking at encodings: what they are, what they cost, what they do with distance.

Nothing in training imports this package.
"""
