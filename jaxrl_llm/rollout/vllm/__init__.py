"""vLLM as the engine: a process of its own for each copy of the model, with verified weights."""
