"""The `flashboot` command as the package has it: `flashboot …`, or `python -m flashboot …`."""

import signal
import sys

from . import _flashboot


def main(arguments=None):
    """Runs the command with `arguments` (by default this process's), and gives what it ends with."""
    # The program hears signals by itself; an interpreter that did too would raise once it has ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = sys.argv[1:] if arguments is None else arguments
    # `-P`: what lies in the working directory is not this package.
    return _flashboot.command(sys.executable, ["-P", "-m", "flashboot"], ["flashboot", *arguments])


if __name__ == "__main__":
    sys.exit(main())
