"""What is compiled and trained: models, and steps of them that are ready."""
