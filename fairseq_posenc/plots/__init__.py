"""Pictures of trained models: a checkpoint opened with its text, and what its attention does."""
