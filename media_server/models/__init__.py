"""What the front knows of a model: its card."""
