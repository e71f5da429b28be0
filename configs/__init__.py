"""The JSON configs, and schema.py, which reads settings."""
