"""What a checkpoint is and says: read safely, identified, adapted to a model, recovered."""
