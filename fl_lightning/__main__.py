"""``python -m fl_lightning``."""

from __future__ import annotations

import sys


def main(args: list[str] | None = None) -> object:
    """Run the command line.

    Args:
        args: Arguments; None takes the process's own.

    Returns:
        The `FederatedCLI` that ran (its ``loop`` holds the record), or what ``compare`` returns.

    Raises:
        SystemExit: On a wrong argument or an interrupt.
    """
    arguments = sys.argv[1:] if args is None else list(args)
    if arguments == ["--version"]:
        from fl_lightning import __version__

        print(__version__)  # before anything heavy is imported
        return None
    from fl_lightning.cli import run

    return run(arguments)


if __name__ == "__main__":
    main()
