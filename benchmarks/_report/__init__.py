"""Reports: results and where they come from, ratios, bars, progress."""
