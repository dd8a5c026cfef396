"""A torch model as each rank holds it.

Its weights and buffers under plain names, the region of each, the tensors' memory, and what watches over them.

May import: distributed, base, errors."""
