"""Code that the benchmarks of speed and memory share. Do not import torch here: see `process`."""
