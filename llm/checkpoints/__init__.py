"""Checkpoints: from the formats that models come in to the transformers folder that the engine loads."""
