"""Shardow's demo: a small diffusion transformer learns digits on several ranks; its averages are kept, judged, saved
and resumed.

Read __main__.py first, then train.py.
"""
