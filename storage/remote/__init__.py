"""Run directories on object storage: a run works on a local disk, and a mirror of it lies below a URI."""
