"""Drop-in surfaces: change an import and keep training. One module for each origin, named after it; what improves and what differs is in docs/migration.md."""
