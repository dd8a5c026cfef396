"""The ranks that act together: agreement and deadlines, the group over a process group's store, tensors gathered to
rank 0 and sent out.

May import: base, errors."""
