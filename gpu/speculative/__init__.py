"""Proposals of tokens that the model then checks several at a time."""
