"""Arms: the work of a benchmark that runs in a process of its own."""
