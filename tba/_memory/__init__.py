"""Memory: how much a process may take, what it keeps, and the host memory that transfers go through."""
