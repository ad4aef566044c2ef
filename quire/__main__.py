"""Makes `python -m quire` the same command as `quire`."""

from quire.cli.main import main

main()
