"""Kills parts of a training run at random, and checks that nothing was lost, repeated or left standing."""
