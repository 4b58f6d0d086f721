"""The endpoints and records for operators: health, metrics, administration, logs and traces of requests."""
