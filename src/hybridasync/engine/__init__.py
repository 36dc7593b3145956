"""The embedded engine: SGLang's HTTP API over a batched torch decoder."""
