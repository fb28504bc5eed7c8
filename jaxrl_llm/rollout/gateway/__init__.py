"""Programs that lead episodes through an OpenAI client: their processes, and the server."""
