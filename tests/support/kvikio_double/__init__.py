"""The test double of libcuda.so.1 for kvikio, what runs over it, and a kvikio in Python for what it cannot show."""
