"""Scores answers: built-in verifiers, a pool of killable processes, and the Ray worker that feeds it."""
