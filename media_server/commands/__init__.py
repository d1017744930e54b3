"""The front's own commands: what a person asks a running service for."""
