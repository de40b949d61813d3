"""Growth: arms and limits of the benchmark that asks how cost grows with size."""
