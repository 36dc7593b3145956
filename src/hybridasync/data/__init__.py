"""Prompt sources, tokenisation and the data that the small recipes make."""
