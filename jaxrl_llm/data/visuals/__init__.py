"""Images and videos of prompts: from what rows hold to patches and placeholder tokens."""
