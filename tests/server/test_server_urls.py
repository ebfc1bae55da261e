"""URLs of servers: what is refused before anything is sent, and what of them is ever shown."""

import pytest

from tests.support.errors import raises
from trinity_events.errors import InvalidUrl
from trinity_events.server import redacted
from trinity_events.server.url import parse

SECRET = "s3cr3t"

UNENCODED = [
    f"redis://u:12/{SECRET}@host:1",
    f"redis://u:12?{SECRET}@host:1",
    f"redis://u:12#{SECRET}@host:1",
    f"redis://u:1?{SECRET}=1@host:1",
    f"redis://u:1/{SECRET}?db=1@host:1",
    f"redis://u:a@b/{SECRET}@host:1",
    f"redis://u:{SECRET}/x@host:1",
    f"redis://:{SECRET}#x@host:1",
    f"redis://u:[{SECRET}/x@host:1",
    f"rediss://u:12/{SECRET}@host:1?ssl_ca_certs=/a@b/ca.pem",
    f"redis+cluster://u:12/{SECRET}@one:1,two:2",
    f"unix://u:12/{SECRET}@/tmp/socket",
]


@pytest.mark.parametrize("url", UNENCODED)
def test_a_password_with_unencoded_characters_is_refused_and_not_shown(url):
    with raises(InvalidUrl, fault="encoding") as caught:
        parse(url)
    assert SECRET not in str(caught.value)
    assert SECRET not in redacted(url)


def test_the_same_passwords_are_taken_when_they_are_encoded():
    assert parse("redis://u:12%2Fs3%3Fc%23r%403t@host:1").url.endswith("@host:1")
    assert parse("unix:///tmp/a@b/socket").url == "unix:///tmp/a@b/socket"


def said_of(url):
    """What is said of a URL; nothing where it is taken."""
    try:
        parse(url)
    except InvalidUrl as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "url",
    [
        f"redis://host?password={SECRET}&db=1",
        f"redis://host?p%61ssword={SECRET}",
        f"rediss://host?ssl_password={SECRET}",
        f"redis://host?{SECRET}",
        f"redis://host?decode_responses=1&x={SECRET}",
        f"redis://me:{SECRET}@host?db=1",
        f"me:{SECRET}@host:1",
        f"redis:/me:{SECRET}@host:1",
        f"http://me:{SECRET}@host:1?p={SECRET}@x",
        f"redis://me:{SECRET}[@host:1",
    ],
)
def test_what_is_shown_of_a_url_has_no_password(url):
    assert SECRET not in redacted(url)
    assert SECRET not in said_of(url)


def test_what_is_no_secret_is_shown():
    url = "rediss://me:word@host:1/2?ssl_ca_certs=/ca.pem&ssl_check_hostname=false"
    assert redacted(url) == url.replace("word", "***")
    assert redacted("redis://host") == "redis://host"


@pytest.mark.parametrize(
    "option",
    [
        *("decode_responses=true", "encoding=latin-1", "encoding_errors=ignore", "protocol=3"),
        *("legacy_responses=false", "socket_timeout=1", "retry_on_timeout=true", "parser_class=x"),
        *("max_connections=1", "health_check_interval=1", "ssl_validate_ocsp=1", "nonsense=1"),
    ],
)
@pytest.mark.parametrize("scheme", ["redis://host", "redis+cluster://host", "unix:///tmp/socket"])
def test_an_option_that_is_not_the_users_is_refused_by_its_name(scheme, option):
    with raises(InvalidUrl, fault="option", option=option.partition("=")[0]):
        parse(f"{scheme}?{option}")


@pytest.mark.parametrize(
    "option",
    [
        *("db=2", "username=me", "password=word", "client_name=me", "ssl_check_hostname=false"),
        *("ssl_cert_reqs=none", "socket_connect_timeout=3"),
    ],
)
def test_the_options_of_users_are_taken(option):
    assert parse(f"rediss://host?{option}").url.endswith(option)


@pytest.mark.parametrize("option", ["db=", "db", "ssl_ca_certs=", "&"])
def test_an_option_without_a_value_is_refused(option):
    with raises(InvalidUrl, fault="no value"):
        parse(f"rediss://host?{option}")


@pytest.mark.parametrize(
    "url",
    [
        *("redis://host/nonsense", "redis://host/1/2", "redis://host/-1", "redis://host/1x"),
        *("redis+cluster://host/nonsense", "redis://host/1?db=2"),
        "redis://host?db=-1",
    ],
)
def test_what_is_no_database_is_refused(url):
    with raises(InvalidUrl, fault="database"):
        parse(url)


def test_databases_by_number_are_taken():
    for url in ("redis://host", "redis://host/", "redis://host/0", "redis://host/15"):
        assert parse(url).url == url


def test_a_path_of_a_socket_that_became_a_host_is_refused():
    with raises(InvalidUrl, url="unix://tmp/socket", fault="form"):
        parse("unix://tmp/socket")
    assert parse("unix://me:word@/tmp/socket").url == "unix://me:word@/tmp/socket"


@pytest.mark.parametrize(
    "url",
    [f"redis://u:12/{SECRET}@127.0.0.1:1", f"redis://127.0.0.1:1?decode_responses=1&x={SECRET}"],
)
@pytest.mark.parametrize("command", [("runs",), ("status",), ("tail", "run"), ("reducer",)])
def test_every_command_refuses_such_a_url_in_one_sentence(cli, command, url):
    result = cli(*command, env={"TRINITY_REDIS_URL": url})
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    assert SECRET not in result.stdout + result.stderr
