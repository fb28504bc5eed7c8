"""Agents of other frameworks, unmodified, that learn behind the gateway."""
