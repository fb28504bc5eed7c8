"""OpenAI's APIs: requests, responses, a client; shared by the gateway and the server."""
