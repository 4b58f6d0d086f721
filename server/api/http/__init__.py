"""HTTP on its own: connections, limits, authentication, JSON bodies, errors. Knows no endpoint."""
