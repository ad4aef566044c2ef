"""Makes `python -m quire` the same command as `quire`."""

from quire.cli.start import main

main()
