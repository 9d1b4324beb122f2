"""What outlives a process: records, the ledger, checkpoints, datasets, models and history."""
