"""Peers: what else takes activations out of memory, each put around one model by its own public interface."""
