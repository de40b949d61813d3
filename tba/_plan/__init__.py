"""Plans: what of a step is kept, moved and recomputed, decided by pure functions of what was observed."""
