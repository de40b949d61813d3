"""Fidelity: what saving less costs a training; its tasks, its arms, and runs that outlive the process."""
