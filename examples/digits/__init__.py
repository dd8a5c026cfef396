"""Shardow's demo: a small diffusion transformer learns handwritten digits on several ranks, and its averages are kept, judged, saved and resumed.

Read __main__.py first, then train.py.
"""
