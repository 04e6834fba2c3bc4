"""Who logs in, and where each process gets the password from.

In order: the options `user` and `password`; the files or the environment variable that the options
`userFile`, `passwordFile`, `passwordEnv` name; the environment variables `WARREN_USER` and
`WARREN_PASSWORD`; guest. Files and variables are those of the process that connects, so on a
cluster each executor needs them. Then nothing secret leaves the driver: `Credentials` hold only
names, and what they lead to is looked up where a connection is made.

A password in an option travels with the tasks, since it has to. It is in no repr and no error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, quote, urlsplit, urlunsplit

from sharding.errors import LocalError
from spark.option_values import BadOption, Hidden, OptionValues

USER_VARIABLE, PASSWORD_VARIABLE = "WARREN_USER", "WARREN_PASSWORD"
_DEFAULT = "guest"


class NoCredentials(LocalError):
    """A file or a variable that should hold a user or a password is not there, or empty."""


@dataclass(frozen=True)
class Login:
    """A user and a password, found in this process."""

    user: str
    password: str = field(repr=False)

    def into(self, uri: str) -> str:
        """`uri`, which holds no login, with this one."""
        parts = urlsplit(uri)
        who = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}"
        return urlunsplit(parts._replace(netloc=f"{who}@{parts.netloc}"))


@dataclass(frozen=True)
class Credentials:
    """Where user and password are found."""

    user: str | None = None
    user_file: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None
    password_env: str | None = None

    @classmethod
    def parse(cls, values: OptionValues) -> Credentials:
        values.at_most_one_of("user", "userFile")
        values.at_most_one_of("password", "passwordFile", "passwordEnv")
        return cls(
            user=values.text("user"),
            user_file=values.text("userFile"),
            password=values.secret("password"),
            password_file=values.text("passwordFile"),
            password_env=values.text("passwordEnv"),
        )

    def login(
        self,
        environment: Mapping[str, str] = os.environ,
        read_file: Callable[[str], str] = lambda path: Path(path).read_text(encoding="utf-8"),
    ) -> Login:
        """Look them up, in this process and now: files and variables may have changed."""
        user = self.user
        if user is None and self.user_file is not None:
            user = _in_file("userFile", self.user_file, read_file)
        password = self.password
        if password is None and self.password_file is not None:
            password = _in_file("passwordFile", self.password_file, read_file)
        elif password is None and self.password_env is not None:
            password = environment.get(self.password_env)
            if not password:
                raise NoCredentials(
                    f"option 'passwordEnv': the environment variable {self.password_env!r} is not "
                    "set in this process; every executor needs it"
                )
        return Login(
            user if user is not None else environment.get(USER_VARIABLE, _DEFAULT),
            password if password is not None else environment.get(PASSWORD_VARIABLE, _DEFAULT),
        )


def uri_without_login(option: str, text: str) -> SplitResult:
    """The parts of `text`, which must hold neither user nor password: Spark shows it in plans."""
    rule = (
        "must hold no user and no password, since Spark shows it in query plans; give them with "
        "the options user and password, passwordFile or passwordEnv"
    )
    # Also where it can't be parsed: then the password may be the reason.
    if "@" in text:
        raise BadOption(option, rule, Hidden())
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018  # raises for a port that is none
    except ValueError:
        raise BadOption(option, "must be an address such as scheme://host:port", text) from None
    if not parts.hostname:
        raise BadOption(option, "must be an address such as scheme://host:port", text)
    return parts


def _in_file(option: str, path: str, read_file: Callable[[str], str]) -> str:
    try:
        text = read_file(path)
    except (OSError, UnicodeDecodeError) as error:
        # Not the error's own text: that of a decoding error holds the content.
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise NoCredentials(
            f"option {option!r}: {path!r} can't be read in this process ({why}); "
            "every executor needs it"
        ) from None
    # Editors and `echo` end a file with a line break, which is not a part of what it holds.
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise NoCredentials(f"option {option!r}: {path!r} is empty")
    return text
