"""Launch scripts, data preparation, and the builders of the tiny models (`python -m scripts.build_tiny_model`)."""
