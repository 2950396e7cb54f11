"""Takes jobs, runs the engine, publishes frames. Knows nothing of HTTP; never imports `api`."""
