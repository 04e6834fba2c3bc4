"""Credentials: found where they should be, and never carried where they need not be."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from sharding.errors import Unreachable
from spark.options.connect import Credentials, Login, NoCredentials
from spark.options.values import BadOption, OptionValues
from spark.process import Failed, without_secrets

CANARY = "kanari 1/Vogel@ü"


def credentials(**options: str) -> Credentials:
    return Credentials.parse(OptionValues(options, "reading"))


def test_options_come_first_then_what_they_name_then_variables_then_guest(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from-file\n")
    (tmp_path / "user").write_text("ann\r\n")
    variables = {"WARREN_USER": "eve", "WARREN_PASSWORD": "from-env", "OTHER": "from-other"}
    files = credentials(userFile=f"{tmp_path}/user", passwordFile=f"{tmp_path}/password")
    assert credentials(user="bob", password=" p").login(variables) == Login("bob", " p")
    assert files.login(variables) == Login("ann", "from-file")
    assert credentials(passwordEnv="OTHER").login(variables) == Login("eve", "from-other")
    assert credentials().login(variables) == Login("eve", "from-env")
    assert credentials().login({}) == Login("guest", "guest")


def test_two_places_for_a_password_are_refused() -> None:
    with pytest.raises(BadOption, match="more than one of password, passwordFile, passwordEnv"):
        credentials(password="a", passwordFile="b")


def test_a_password_from_a_file_or_a_variable_is_not_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text(CANARY)
    monkeypatch.setenv("WARREN_PASSWORD", CANARY)
    monkeypatch.setenv("OTHER", CANARY)
    for found in (
        credentials(),
        credentials(passwordFile=f"{tmp_path}/password"),
        credentials(passwordEnv="OTHER"),
    ):
        assert found.login().password == CANARY
        assert CANARY.encode() not in pickle.dumps(found)


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff\xfe" + CANARY.encode("utf-16")])
def test_a_file_that_holds_no_password_is_an_error_that_names_it(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "password").write_bytes(content)
    with pytest.raises(NoCredentials, match=r"option 'passwordFile': .*password'") as caught:
        credentials(passwordFile=f"{tmp_path}/password").login()
    assert "ogel" not in str(caught.value)


def test_a_variable_that_is_not_set_is_an_error_that_names_it() -> None:
    with pytest.raises(NoCredentials, match="'SESAME' is not set"):
        credentials(passwordEnv="SESAME").login({})


def test_a_login_goes_into_an_address_whatever_it_is_made_of() -> None:
    from sharding.stream.uris import StreamUri

    uri = StreamUri.parse(Login("a:b", CANARY).into("rabbitmq-stream://h:1/v"))
    assert (uri.user, uri.password, uri.vhost) == ("a:b", CANARY, "v")
    assert CANARY not in repr(Login("a", CANARY))


def test_an_error_with_the_password_is_told_without_it() -> None:
    found = Credentials(user="ann", password=CANARY)
    spelled = found.login({}).into("//h")
    for text in (f"can't log in with {CANARY}", f"no such address {spelled}", repr(CANARY)):
        with pytest.raises(Failed) as caught, without_secrets(found):
            raise OSError(text)
        assert "OSError" in str(caught.value)
        assert "ogel" not in str(caught.value)
        assert caught.value.__suppress_context__


def fail(error: Exception, cause: Exception) -> None:
    raise error from cause


def test_an_error_whose_cause_holds_the_password_is_cut_off_from_it() -> None:
    found = Credentials(password=CANARY)
    with pytest.raises(Failed, match="RuntimeError: it failed"), without_secrets(found):
        fail(RuntimeError("it failed"), OSError(CANARY))


def test_an_error_without_secrets_passes_as_it_is() -> None:
    found = Credentials(password=CANARY)
    with pytest.raises(Unreachable, match="no node") as caught, without_secrets(found):
        fail(Unreachable("no node"), OSError("inside"))
    assert caught.value.__cause__ is None
