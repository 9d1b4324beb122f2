"""Keeps every finished group: archives it now, off the critical path."""
