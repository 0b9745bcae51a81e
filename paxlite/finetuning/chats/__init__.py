"""Supervised fine-tuning on prompts and answers, and on chats."""
