"""Runs on the nodes of a Ray cluster: Ray places and supervises, jax does the mathematics."""
