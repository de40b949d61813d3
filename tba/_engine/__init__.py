"""What moves when: the hooks, what they make of a tensor, what waits to be written and what is read ahead."""
