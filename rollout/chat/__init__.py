"""Chat formats in token ids: prompts, tool calls, tool results."""
