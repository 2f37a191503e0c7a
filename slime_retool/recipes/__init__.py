"""Recipes: hooks for a paper's method, by dotted path. Their scripts and data are in examples/."""
