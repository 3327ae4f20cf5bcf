"""The command line's first lines.

Ctrl-C is one message from here on, also in the seconds that importing libraries takes.
"""

import os
import signal


def end_at_once(number: int, _: object) -> None:
    """Ends this process on Ctrl-C, and all that it started, whatever it is busy with.

    Only the first rank says so. An exception would not do: libraries take it for another one, or
    wait for their workers on its way.
    """
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"lacuna: interrupted at once, without saving.\n")
    os._exit(128 + number)


def main() -> int:
    """The command line, where Ctrl-C ends everything at once until a command asks otherwise."""
    signal.signal(signal.SIGINT, end_at_once)
    # The launcher holds Ctrl-C back until we are here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    from lacuna.imports import keep_bytecode  # an extension

    keep_bytecode()
    from lacuna.cli import main
    from lacuna.config.orphans import end_children_with_us

    end_children_with_us()
    return main()


if __name__ == "__main__":
    raise SystemExit(main())
