"""Code of a model, run at a level of isolation that the config names (docs/sandbox.md)."""
