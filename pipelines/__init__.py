"""Turns the actors into a training system: configuration, conductor, schedules, monitoring and the command line."""
