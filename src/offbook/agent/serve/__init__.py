"""The recorder over HTTP: OpenAI's chat completions and responses, Anthropic's messages, and sessions."""
