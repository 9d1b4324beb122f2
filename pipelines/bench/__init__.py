"""Benchmarks that measure things side by side in one run, so that a ratio never depends on another day's machine."""
