"""Rank entry points, launcher, torchrun environment and process supervision."""

import os

# TensorPipe warns of every connection that ends, the orderly ones included. torch reads this once, when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
