"""Request models and response builders, one module per resource."""
