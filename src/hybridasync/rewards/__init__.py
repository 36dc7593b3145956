"""Reward functions: exact match, GSM8K, math-verify, or the user's own."""
