"""The tasks with their criterions: importing a module here registers its names with fairseq."""
