"""What can be wrong with a question."""


class PlanningError(Exception):
    """Something asked for that cannot be answered. The message is one line, and names what is at fault."""
