"""Writes answers: the engine protocol, the torch engine, and the Ray worker that drives an engine."""
