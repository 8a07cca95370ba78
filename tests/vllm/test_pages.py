"""The servers' commands of the pages: vLLM's command line takes them, and costcache their settings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from costcache.vllm import build
from tests.docs.commands import Command, commands


@pytest.mark.parametrize("command", commands("vllm"), ids=str)
def test_the_command_line_takes_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "device_type", "cpu")  # the newest vLLM's wheels look for a GPU
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*command.words[2:]])
    assert command.words[1] == "serve"
    assert "MODEL" in command.words
    given = args.additional_config
    connector = args.kv_transfer_config
    asked = build.read_config(SimpleNamespace(additional_config=given)) is not None
    assert asked or "COSTCACHE_VLLM=" in command.text or "costcache.vllm" in str(connector)
