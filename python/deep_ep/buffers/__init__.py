"""The buffers: memory that the ranks of a group exchange through."""
