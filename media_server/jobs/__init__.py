"""Durable jobs: the database is the truth, the broker a doorbell."""
