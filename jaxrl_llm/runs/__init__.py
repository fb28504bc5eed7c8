"""A run's directory: locks, checkpoints, how it resumes and ends."""
