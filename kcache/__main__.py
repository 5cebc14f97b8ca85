"""`python -m kcache`."""

from kcache.cli.main import main

main()
