"""Measurements of Quire and of the servers it is compared with. `python -m bench` lists them."""
