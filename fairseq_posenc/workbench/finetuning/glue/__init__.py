"""Fine-tunes a pre-trained masked LM on eight tasks of GLUE, and reports the results."""
