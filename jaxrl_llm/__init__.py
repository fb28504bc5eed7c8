"""Reinforcement learning for large language models as pure JAX functions over a named mesh."""
