"""What runs on Ray: one folder a role, each with a core class that knows nothing of Ray and a worker that wraps it."""
