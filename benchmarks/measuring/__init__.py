"""What the benchmarks of speed and memory share. Import nothing of torch here: see `process`."""
