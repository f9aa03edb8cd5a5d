"""The registry file: which worker ids may connect, for which projects, with which tokens.

A TOML file, read again when it changes:

    [workers.builder-1]
    active = true                    # the default
    capabilities = ["build", "eval"] # the default: all of fetch, eval, build
    key = "<CURVE public key, Z85>"  # optional: the only key this id may use
    [workers.builder-1.projects]
    default = "sha256:<hex of the token's SHA-256>"

Tokens are compared in constant time against their hashes and appear nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from transport import messages as m
from transport.curve import is_key


class BadRegistry(Exception):
    """The registry file cannot be used; the text is one line that says why."""


class Registration(Struct, frozen=True, forbid_unknown_fields=True):
    """One worker id of the registry file."""

    active: bool = True
    capabilities: tuple[str, ...] = ("fetch", "eval", "build")
    key: str | None = None
    projects: dict[m.Id, str] = {}

    def allows(self, asked: m.Capabilities) -> m.Capabilities:
        """What the worker asked for, less what its registration leaves out."""
        return m.Capabilities(
            fetch=asked.fetch and "fetch" in self.capabilities,
            eval=asked.eval and "eval" in self.capabilities,
            build=asked.build and "build" in self.capabilities,
        )

    def verify(self, tokens: Mapping[str, str]) -> tuple[frozenset[str], list[m.FailedPeer]]:
        """The projects whose token is right, and the others with the reason."""
        good, failed = set(), []
        for project, stored in sorted(self.projects.items()):
            token = tokens.get(project)
            if token is None:
                failed.append(m.FailedPeer(peer=project, reason="no token given"))
                continue
            digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
            if hmac.compare_digest(f"sha256:{digest}", stored):
                good.add(project)
            else:
                failed.append(m.FailedPeer(peer=project, reason="wrong token"))
        return frozenset(good), failed


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    workers: dict[m.Id, Registration] = {}


def read_registry(text: str, source: str) -> dict[str, Registration]:
    """The registrations of a registry file by worker id; raises `BadRegistry`."""
    try:
        workers = msgspec.convert(tomllib.loads(text), _File).workers
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadRegistry(f"{source}: {error}") from None
    for worker, registration in workers.items():
        unknown = set(registration.capabilities) - {"fetch", "eval", "build"}
        if unknown:
            raise BadRegistry(
                f"{source}: worker {worker}: unknown capability {min(unknown)!r}; "
                "known are fetch, eval, build"
            )
        if registration.key is not None and not is_key(registration.key):
            raise BadRegistry(
                f"{source}: worker {worker}: key is not a Z85 public key (headrace keygen)"
            )
        for project, stored in registration.projects.items():
            prefix, _, digest = stored.partition(":")
            if prefix != "sha256" or len(digest) != 64 or not _is_hex(digest):
                raise BadRegistry(
                    f"{source}: worker {worker}, project {project}: write the token's hash as "
                    "sha256:<64 hex digits> (printf %s TOKEN | sha256sum)"
                )
    return workers


def _is_hex(text: str) -> bool:
    return all(c in "0123456789abcdef" for c in text)
