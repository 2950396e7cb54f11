"""Tests that need an NVIDIA GPU: `pytest -m gpu`, or deploy/gpu_check.sh for everything."""
