"""Plans decided in other ways than the library's, to compare with."""
