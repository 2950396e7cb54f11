"""HTTP in; SSE and JSON out. Knows Flask and the store, nothing of engines; never imports `workers`."""
