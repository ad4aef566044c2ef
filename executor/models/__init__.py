"""The decoder, which all model families share: `decoder.py` defines its layers, `program.py` runs them on the CPU."""
