"""Tier "auto": whether the hooks rest, and plans for steps that memory has no room for."""
