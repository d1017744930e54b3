"""The front: HTTP, durable jobs, artifacts, webhooks and the command line; it knows models only by their cards."""
