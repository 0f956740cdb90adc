"""Outputs that follow a grammar: which tokens may come next at every position."""
