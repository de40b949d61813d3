"""The parts of the io benchmark: memory, arms, rounds, and fio."""
