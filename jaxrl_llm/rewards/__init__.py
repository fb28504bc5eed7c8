"""Reward functions and how they are run."""
