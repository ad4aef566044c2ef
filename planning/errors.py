"""The error that planning raises for input it cannot use."""


class PlanningError(Exception):
    """Invalid input, such as an unknown model or a setting out of range. The one-line message names the cause."""
