"""Rank entry points, launcher, torchrun environment, process supervision."""
