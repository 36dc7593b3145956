"""Weights between trainer and engine: snapshots in Hugging Face layout, SGLang's parameter names and checksums."""
