"""Benchmarks that others can check: paired trials, their statistics and evidence, and what the control plane costs."""
