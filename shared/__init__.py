"""What the API and the workers must agree on. Imports neither."""
