"""Fine-tuning of pre-trained masked LMs: GLUE and SQuAD."""
