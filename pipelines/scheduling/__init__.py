"""Pure scheduling policies: they decide, the conductor acts, and a simulator can run the same objects."""
