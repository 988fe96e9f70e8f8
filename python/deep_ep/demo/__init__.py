"""Trains a small MoE language model over ranks and in one process, and compares the two."""
