"""The engine in pure JAX."""
