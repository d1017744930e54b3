"""Timelines that editing programs open."""
