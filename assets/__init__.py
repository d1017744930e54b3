"""Embedded weights, cards, prompts and reference clips, each folder with its origin and licence."""
