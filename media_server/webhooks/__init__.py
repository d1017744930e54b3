"""Webhooks: signatures, the retry schedule, and what an answer means."""
