"""Logs, metrics, progress display, report."""
