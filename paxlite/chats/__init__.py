"""Conversations and their templates, and records of prompts and answers: how a model reads them."""
