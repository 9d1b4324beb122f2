"""Indexes over token histories: what has followed what a row has just written. Nothing else in storage uses numba."""
