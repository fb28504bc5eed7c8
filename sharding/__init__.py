"""Meshes, rules from logical to mesh axes, and moves between layouts."""
