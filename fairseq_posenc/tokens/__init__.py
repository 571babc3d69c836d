"""Text to the numbers of fairseq's dictionary."""
