"""Reports over many runs: the papers' tables with a user's results, and learning curves."""
