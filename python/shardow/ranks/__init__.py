"""The ranks that act together.

Agreement and deadlines, the group over a process group's store, tensors gathered to rank 0 and sent out from it.

May import: base, errors."""
