"""Draft retrieval: keeps the history of answers and turns it into drafts for the rollout workers."""
