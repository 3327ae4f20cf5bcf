"""The command line's first lines: Ctrl-C is one message from here on, the seconds of importing libraries included."""

import os
import signal


def end_at_once(number: int, _: object) -> None:
    """Ends this process on Ctrl-C, and with it all that it started, whatever it is busy with; ranks but one silently.

    An exception would not do: libraries take it for another, or wait for their workers on its way.
    """
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"lacuna: interrupted at once, without saving.\n")
    os._exit(128 + number)


def main() -> int:
    """The command line, where Ctrl-C ends everything at once until a command asks otherwise."""
    signal.signal(signal.SIGINT, end_at_once)
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGINT}
    )  # the launcher holds it back until we are here
    from lacuna.cli import main
    from lacuna.config.orphans import end_children_with_us

    end_children_with_us()
    return main()


if __name__ == "__main__":
    raise SystemExit(main())
