"""`headrace keygen`: CURVE keys."""

from __future__ import annotations

from pathlib import Path

import click

from bin.errors import CommandError
from bin.options import FILE, json_option
from bin.output import note, print_json, say
from transport.curve import KeyFileError, generate


@click.command()
@click.argument("file", type=FILE, default=Path("headrace.key"))
@json_option
def keygen(file: Path, as_json: bool) -> None:
    """Make a key pair: the secret key in FILE (headrace.key), the public one in FILE.pub.

    Prints the public key. Both files are new and for their owner's eyes only; the public one may
    be handed on.
    """
    public_file = file.with_name(f"{file.name}.pub")
    try:
        pair = generate(file, public_file)
    except KeyFileError as error:
        raise CommandError(str(error)) from None
    if as_json:
        files = {"secret_file": str(file), "public_file": str(public_file)}
        print_json({"public_key": pair.public, **files})
    else:
        note(f"secret key in {file}, public key in {public_file}")
        say(pair.public)
