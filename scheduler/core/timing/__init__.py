"""Time in the core, which has no clock: deadlines, and the budget of a step by what steps have cost."""
