"""Fine-tuning: on chats, preferences, a teacher, and rewards of a model's own answers."""
