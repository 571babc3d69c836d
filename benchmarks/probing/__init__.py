"""What the benchmark ``probe`` is made of."""
