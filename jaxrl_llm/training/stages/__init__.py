"""The stages of a training step, each built from the config by its own module."""
