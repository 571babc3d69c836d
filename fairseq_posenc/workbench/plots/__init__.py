"""Looking inside: a checkpoint opened with its text, and pictures of what positions do in it."""
