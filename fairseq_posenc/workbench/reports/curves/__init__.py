"""Learning curves of trainings, from their logs: what ``fairseq-posenc curves`` shows."""
