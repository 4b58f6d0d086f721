"""What Prometheus reads: `families` says what there is, `registry` counts it."""
