"""Measurements of Quire and of the servers beside it. `python -m bench` lists them."""
