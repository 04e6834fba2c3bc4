"""`python -m sharding.cli` is the command `warren`."""

from sharding.cli.main import main

if __name__ == "__main__":
    main()
