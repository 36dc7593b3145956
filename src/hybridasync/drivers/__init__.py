"""Sequences: coroutines that speak to ports, with anyio alone."""
