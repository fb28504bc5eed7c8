"""Trackers of a run: where its metrics, answers and distributions go besides its own folder."""
