"""The record of every rollout: one schema for the archive on disk and for what drafts are taken from."""
