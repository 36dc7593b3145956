"""Adapters of the ports: SGLang and sidecar over httpx, workers over torch RPC, journal, snapshots."""
