"""The fault campaign: random faults at random points of training steps."""
