"""The API's resources, one file each; every file exposes `router`."""
