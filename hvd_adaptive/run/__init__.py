"""Run one step: gradients arrive, travel in groups, and come back averaged."""
