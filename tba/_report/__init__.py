"""Report: one page that shows what was saved, moved and waited for."""
