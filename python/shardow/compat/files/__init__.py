"""The file formats of the origins, and how a file becomes whole or stays away. They import the core and `_impl`, and no
surface.
"""
