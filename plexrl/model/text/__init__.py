"""Text of models: token ids, chat templates and end tokens, without torch."""
