"""Which token files are used, and what is said of the others."""

import os
import re
from pathlib import Path

import pytest

from evener.cli import main
from evener.errors import ConfigError
from evener.team.wire import read_token

TOKEN = b"0123456789abcdef"


def write(path: Path, token: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(token)
    path.chmod(mode)
    return path


def test_a_token_has_some_length(tmp_path: Path) -> None:
    assert read_token(None) == b""
    assert read_token(write(tmp_path / "token", b" " + TOKEN + b"\n")) == TOKEN
    for wrong, said in (
        (write(tmp_path / "short", b" short \n"), "has 5 bytes; give 16 to 4096 random ones"),
        (write(tmp_path / "long", b"x" * 9999), "has 4097 bytes; give 16 to 4096 random ones"),
        (tmp_path / "none", "cannot be read (No such file or directory)"),
        (tmp_path, "cannot be read (Is a directory)"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            read_token(wrong)


@pytest.mark.parametrize(
    "command",
    [
        ["doctor", "--listen", "--token-file", "TOKEN"],
        ["doctor", "127.0.0.1", "--token-file", "TOKEN"],
        ["dashboard", ".", "--token-file", "TOKEN"],
        ["coordinator", "1:2", "--token-file", "TOKEN"],
        ["join", "127.0.0.1:1", "--token-file", "TOKEN", "pretrain"],
        ["launch", "--elastic", "1:2", "--token-file", "TOKEN", __file__],
    ],
    ids=lambda command: command[0],
)
def test_a_file_that_others_can_read_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = write(tmp_path / "token", TOKEN, 0o640)
    words = [str(token) if word == "TOKEN" else word for word in command]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: the token file {token} is open to other users (mode 0640)")
    assert f"run `chmod 600 {token}`" in said


@pytest.mark.root
def test_the_file_of_another_user_is_refused(tmp_path: Path) -> None:
    token = write(tmp_path / "token", TOKEN)
    os.chown(token, 12_345, -1)
    with pytest.raises(ConfigError, match=r"belongs to another user \(uid 12345\).*`chown 0 "):
        read_token(token)


@pytest.mark.root
def test_a_secret_of_kubernetes_may_be_read_by_the_group_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubelet gives it to root and to ``fsGroup``; the pod is another user."""
    token = write(tmp_path / "token", TOKEN, 0o440)
    with pytest.raises(ConfigError, match=r"open to other users \(mode 0440\)"):
        read_token(token)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert read_token(token) == TOKEN
    for mode in (0o444, 0o460):
        token.chmod(mode)
        with pytest.raises(ConfigError, match="open to other users"):
            read_token(token)
