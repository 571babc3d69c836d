"""SQuAD 1.1 and 2.0: fine-tuning, answers, and the official scores (``fairseq-posenc squad``)."""
