"""HTTP below the endpoints: connections, limits, authentication, JSON bodies, errors. Knows no endpoint."""
