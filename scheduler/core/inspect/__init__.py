"""Views of the scheduler core: block maps, invariants, step loads, and the leap of simulators."""
