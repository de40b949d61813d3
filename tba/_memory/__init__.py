"""How much memory there is, what may be taken of it, and copies between a device's and the host's."""
