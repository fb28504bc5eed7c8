"""Scorers and how they are run."""
