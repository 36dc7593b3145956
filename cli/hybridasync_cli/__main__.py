"""`python -m hybridasync_cli` is the console script."""

from hybridasync_cli.start import main

if __name__ == "__main__":
    main()
