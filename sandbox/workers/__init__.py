"""Worker processes for the user's own tools: broker, one template process a file, forked workers. No sandbox."""
