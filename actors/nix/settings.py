"""How this project runs Nix: the environment, the cache's address with its parameters."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode

from msgspec import Struct

_CONFIG_LIMIT_SECS = 5.0
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SETTINGS = (
    # What a cache lacks or lost may be there, or be needed, a moment later.
    "narinfo-cache-negative-ttl = 0",
    "narinfo-cache-positive-ttl = 0",
    # The farm distributes; a worker builds what it was assigned, itself.
    "builders =",
    "extra-experimental-features = nix-command flakes",
    # Of a cache that hangs; Nix itself would wait for 25 minutes.
    "connect-timeout = 10",
    "stalled-download-timeout = 30",
    "download-attempts = 3",
)


class Nix(Struct, frozen=True):
    """A store and its binary cache."""

    store: str | None = None
    """Store URI; none for Nix's own default."""
    cache: str | None = None
    key_file: Path | None = None
    """Secret key to sign what is written to the cache."""

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """For every Nix program; what the operator configured stays in force.

        What is read from the cache is checked against the public half of the key; without a key
        the cache is trusted: whoever may write to it may write to the stores of the farm.
        """
        env = dict(os.environ if base is None else base)
        lines = [*_SETTINGS]
        if self.cache is not None:
            trusted = {} if self.key_file is not None else {"trusted": "1"}
            lines.append(f"extra-substituters = {with_parameters(self.cache, trusted)}")
            if self.key_file is not None:
                lines.append(f"extra-trusted-public-keys = {public_key(self.key_file)}")
        env["NIX_CONFIG"] = "\n".join(filter(None, (env.get("NIX_CONFIG"), *lines)))
        return env

    def copy_to_cache(self, paths: list[str]) -> list[str]:
        """The command that copies paths of the store, with all they refer to, to the cache."""
        assert self.cache is not None
        return [*self._copy_to(self.cache), *paths]

    @property
    def signed_cache(self) -> str | None:
        """Address of the cache that signs, if it can, what is written there."""
        return None if self.cache is None else self._signing(self.cache)

    def sign(self, paths: list[str]) -> list[str] | None:
        """The command that signs paths of the store, for a cache that is a store of its own and
        does not sign what it is sent; none if the cache signs, or there is no key."""
        if self.key_file is None or self._signs_itself:
            return None
        key = str(self.key_file.absolute())
        return ["nix", "store", "sign", *self.store_option, "--key-file", key, *paths]

    def copy_to_folder(self, folder: Path) -> list[str]:
        """The command, but for the paths, that writes them into a folder as they would be written
        to the cache."""
        _, _, query = (self.cache or "").partition("?")
        return self._copy_to(f"file://{folder}?{query}")

    def _copy_to(self, uri: str) -> list[str]:
        target = self._signing(uri)
        return ["nix", "copy", "--no-check-sigs", *self.store_option, "--to", target]

    def _signing(self, uri: str) -> str:
        key = {}
        if self.key_file is not None and self._signs_itself:
            key["secret-key"] = str(self.key_file.absolute())
        return with_parameters(uri, key)

    def check_signatures(self, paths: list[str], store: str | None) -> list[str]:
        """The command that fails if paths of a store or cache are not signed by a trusted key."""
        chosen = [] if store is None else ["--store", store]
        return ["nix", "store", "verify", "--no-contents", *chosen, *paths]

    @property
    def _signs_itself(self) -> bool:
        return (self.cache or "").startswith(("file:", "http:", "https:", "s3:"))

    @property
    def store_option(self) -> list[str]:
        return [] if self.store is None else ["--store", self.store]


class BadStore(ValueError):
    """A store that this cannot be done with; the text is one line."""


def store_root(store: str | None) -> str:
    """Where the files of a store are: what stands before `/nix/store` of a chroot store."""
    if store is None:
        return ""
    base, _, query = store.partition("?")
    if base.startswith("/"):
        return base.rstrip("/")
    root = parse_qs(query).get("root")
    if base in ("", "local", "auto", "daemon") or base.startswith("unix://"):
        return root[0].rstrip("/") if root else ""
    raise BadStore(f"derivations in the store {store} cannot be read as files")


class NixFailed(Exception):
    """A Nix program did not do as told; the text is one line."""


def show_config(env: Mapping[str, str]) -> dict[str, Any]:
    """Nix's settings in force, by name. Blocks for some 50 ms; raises `NixFailed`."""
    # The first is the name since 2.20, the second until then.
    said = ""
    for words in (("config", "show"), ("show-config",)):
        try:
            done = subprocess.run(  # noqa: S603 - Nix
                ["nix", *_FEATURE, *words, "--json"], env=dict(env),  # noqa: S607 - on PATH
                capture_output=True, timeout=_CONFIG_LIMIT_SECS, check=False,
            )  # fmt: skip
            if done.returncode == 0:
                return {name: entry["value"] for name, entry in json.loads(done.stdout).items()}
            said = plain(done.stderr.decode(errors="replace")) or f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            said = f"no answer within {_CONFIG_LIMIT_SECS:g} s"
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            said = f"{type(error).__name__}: {error}"
    raise NixFailed(f"Nix does not tell its settings: {said}")


class BadKey(ValueError):
    """The key file cannot be used; the text is one line."""


def public_key(secret_key: Path) -> str:
    """The public half of a key that `nix-store --generate-binary-cache-key` made.

    Raises: `BadKey`.
    """
    try:
        with secret_key.open("rb") as file:
            done = subprocess.run(  # noqa: S603 - Nix
                ["nix", "key", "convert-secret-to-public", *_FEATURE],  # noqa: S607 - on PATH
                stdin=file, capture_output=True, check=False,
            )  # fmt: skip
    except OSError as error:
        raise BadKey(f"cannot read the key {secret_key}: {error.strerror}") from None
    if done.returncode:
        raise BadKey(f"{secret_key} is not a secret key of nix-store --generate-binary-cache-key")
    return done.stdout.decode().strip()


_FEATURE = ("--extra-experimental-features", "nix-command")


def with_parameters(uri: str, parameters: Mapping[str, str]) -> str:
    """A store URI with parameters added; what it says itself stays."""
    base, _, query = uri.partition("?")
    merged = {**parameters, **dict(parse_qsl(query, keep_blank_values=True))}
    return f"{base}?{urlencode(merged, safe='/:+')}" if merged else base


def plain(text: str) -> str:
    """Nix's messages without colours, on one line."""
    return " ".join(_ANSI.sub("", text).split())
