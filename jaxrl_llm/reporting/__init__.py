"""What a run's files tell a reader: what looks wrong."""
