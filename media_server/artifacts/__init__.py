"""Files that jobs make and take: one store, on disk or in S3."""
