"""Batches: files of requests that are run for their owner while the service has room (OpenAI's Batch API)."""
