"""Training of the papers' models: recipes, commands, plans."""
