"""Advantages, filters, reward shaping and importance corrections, without tensors."""
