"""Why a command ends other than well: one line for people, one exit code for programs."""

from __future__ import annotations

FAILED = 1
"""The job or graph failed, or something broke here."""
USAGE = 2
UNREACHABLE = 3
REFUSED = 4
NOT_RUNNABLE = 5
"""Of `explain`: no worker that is connected will run the job as things are."""
INTERRUPTED = 130
BROKEN_PIPE = 141


class CommandError(Exception):
    """Ends the command with `code`; the text is one line that says what to do."""

    code = USAGE

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class ServerUnreachable(CommandError):
    """No server answered within the time there was."""

    code = UNREACHABLE
