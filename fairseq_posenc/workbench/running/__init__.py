"""Running programs and what they leave: folders, logs, checkpoints. No job has it to itself."""
