"""What a run reports: metrics, display, trackers, profiles."""
