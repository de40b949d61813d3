"""Host memory to transfer from and into, used again from step to step."""
