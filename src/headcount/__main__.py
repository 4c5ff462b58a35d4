"""``python -m headcount``: the command line."""

from headcount.cli.main import main

if __name__ == "__main__":
    main()
