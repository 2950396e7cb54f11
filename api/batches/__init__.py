"""Batches: many requests in a file, run when nobody else wants the lanes.

`records` is what the store knows of them; `input_file` reads and checks a file of requests; `order` puts those that
begin alike next to each other; `endpoints` makes jobs of them; `run` carries one batch through; `runner` is the process
that has several under way.
"""
