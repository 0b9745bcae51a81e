"""A server with OpenAI's API for a model of paxlite."""
