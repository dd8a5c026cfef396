"""Adapters: where a PyTorch model keeps its weights on this rank, and how to keep them in step with what shardow writes."""
