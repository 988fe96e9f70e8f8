"""Measures dispatch and combine against this machine's ceilings and against torch.distributed."""
