"""Reports over many runs: the papers' tables, learning curves, generated documentation."""
