"""Hugging Face directories: configs, weights and adapters, read and written."""
