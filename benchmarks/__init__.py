"""Measurements of the product, made with its own parts: `python -m benchmarks.<name>` prints one JSON line."""
