"""In front of the package on the path of `./scripts/test --without-jsonschema`: as if it were not installed."""

raise ImportError("jsonschema is hidden from this run")
