"""An OpenAI-compatible server on top of an engine."""
