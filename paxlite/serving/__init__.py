"""A server that answers requests in the form of OpenAI's API with a model of paxlite."""
