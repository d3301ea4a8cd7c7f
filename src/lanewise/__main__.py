"""`python -m lanewise` is the command line."""

from lanewise.cli.main import main

if __name__ == "__main__":
    main()
