"""Learning curves of trainings, from their logs: what ``fairseq-posenc learning-curves`` shows."""
