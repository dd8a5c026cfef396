"""Side-by-side measurements.

`python -m benchmarks` writes docs/performance.md, `python -m benchmarks.numerics` the table of docs/numerics.md.
"""
