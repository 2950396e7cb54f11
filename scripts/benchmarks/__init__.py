"""Measurements that anyone can repeat. Each module has a `main(argv)`."""
