"""Updates the policy: advantages, losses, packing, and the pull-based learning loop."""
