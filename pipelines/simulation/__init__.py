"""A virtual clock for the schedules: the conductor's own policy objects on a modelled cluster of any size."""
